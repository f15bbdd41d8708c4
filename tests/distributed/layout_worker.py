"""Run on every rank: one rollout step's loss, metrics and gradients for many layouts and cuts,
saved by rank 0.

Arguments: a JSON file with {"model": path, "out": path, "layouts": [[name, sizes,
{variant: overrides}], ...]}.
"""

import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.kl import FixedKLController
from megatron_dapo.config.derived import (
    needs_reference,
    replays_servers_experts,
    uses_critic,
    uses_experience_replay,
)
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.data.samples import Group
from megatron_dapo.data.token_dump import TokenDump
from megatron_dapo.estimates.memory import States, model_states
from megatron_dapo.huggingface.lora_settings import actor_is_reference
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.peft_folder import adapter_source
from megatron_dapo.models.weight_map import expert_parameters
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.training import optimizer
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.critic import Critic
from megatron_dapo.training.distribute import StepDistributor, StepShard
from megatron_dapo.training.losses import MicroBatchLoss
from megatron_dapo.training.metric_sums import MetricSums
from megatron_dapo.training.policy import MiniBatch, Policy
from megatron_dapo.training.reference import ActorAsReference, Reference
from megatron_dapo.training.token_dumps import TokenDumps
from tests.distributed.process_groups import leave
from tests.synthetic import synthetic_groups, with_branches, with_experts, with_older, with_replayed

COMMON = [
    "data.train_batch_size=8",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.dump_samples=0",
    "actor_rollout_ref.rollout.temperature=0.9",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dapo=true",
    "actor_rollout_ref.actor.entropy_coef=0.01",
    "actor_rollout_ref.actor.max_tokens_per_microbatch=4096",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    # Adam divides by |gradient|: a large epsilon keeps the rounding noise of vanishing gradients
    # from becoming whole steps
    "actor_rollout_ref.actor.optim.eps=1e-2",
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false",
    "actor_rollout_ref.actor.megatron.dtype=float32",
]


def gathered(source: WeightSource, layout: ParallelLayout) -> dict[str, torch.Tensor]:
    """Full tensors of all stages, on every rank."""
    specs = source.specs()
    tensors = source.gather(specs)
    own = dict(zip((s.name for s in specs), (t.clone() for t in tensors), strict=True)) if tensors else {}
    return {name: tensor for part in layout.gather(own) for name, tensor in part.items()}


def run_variant(model_path: str, layout: ParallelLayout, sizes: dict, overrides: list[str]) -> dict:
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "cp": "context_parallel_size",
    }
    parallel = [f"actor_rollout_ref.actor.megatron.{names[k]}={v}" for k, v in sizes.items() if k in names]
    parallel.append(f"trainer.n_procs_per_node={layout.world_size}")
    config = load_config(None, [*COMMON, f"actor_rollout_ref.model.path={model_path}", *parallel, *overrides])
    policy = Policy(config, layout)
    num_groups = config.data.train_batch_size
    groups = synthetic_groups(policy.model.spec.vocab_size, num_groups=num_groups) if layout.rank == 0 else None
    if groups and uses_experience_replay(config):
        groups = with_replayed(groups)
    if groups and config.actor_rollout_ref.rollout.max_staleness:
        groups = with_older(groups)
    if groups and replays_servers_experts(config):
        groups = with_experts(groups, RouterShape.of(policy.model.spec))
    if groups and config.actor_rollout_ref.rollout.agent.enable:
        groups = with_branches(groups)
    shard = StepDistributor(config, layout, policy.model.spec, policy.model.routed_layers)(0, groups)
    scored = shard.mini_batches
    if needs_reference(config):
        is_own = actor_is_reference(config)
        scored = (ActorAsReference(config, policy) if is_own else Reference(config, layout)).score(scored)
    shard = shard.with_mini_batches(policy.score(scored))
    critic = Critic(config, layout) if uses_critic(config) else None
    if critic is not None:
        shard = critic.score(shard)
    controller = FixedKLController(config.algorithm.kl_ctrl.kl_coef)
    shard, extra = estimate_advantages(shard, controller, config, layout)
    scored = shard.mini_batches
    result = {"num_micro_batches": [len(mini) for mini in scored]}
    result["estimates"] = estimates_by_sample(scored, layout)
    result["dump"] = dumped(config, layout, groups, shard)
    with first_step_recorded(policy, result):
        result["metrics"] = {**policy.update(scored, weight_version=0), **extra}
    source = policy.weight_source()
    result["weights"] = gathered(source, layout)
    assert all(result["weights"][spec.name].dtype == spec.dtype for spec in source.specs())
    estimated = model_states(config, policy.model.spec, layout.pp_rank)
    buffers = [buffer for stage in policy.state.stages for buffer in stage.buffers]
    result["num_buckets"] = sum(len(buffer.buckets) for buffer in buffers)
    result["states"] = layout.gather((layout.pp_rank, asdict(states_of(policy)), asdict(estimated)))
    if policy.model.spec.moe and policy.model.lora is None:
        result["errors"] = errors_of_a_poisoned_expert(policy, scored, layout)
    if critic is not None:
        result["critic"] = critic_step(critic, shard, layout)
    return result


def states_of(policy: Policy) -> States:
    """The parts present here, counted tensor by tensor,
    without the padding of Megatron's buffers."""
    parameters = [parameter for chunk in policy.model.chunks for parameter in chunk.parameters()]
    of_optimizer = 0
    for part in getattr(policy.state.optimizer, "chained_optimizers", [policy.state.optimizer]):
        of_optimizer += sum(num_bytes(t) for state in part.optimizer.state.values() for t in state.values())
        names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        of_optimizer += sum(num_bytes(t) for name in names for group in getattr(part, name, ()) for t in group)
    gradients = [parameter.main_grad for parameter in parameters if parameter.requires_grad]
    assert not any(hasattr(p, "main_grad") for p in parameters if not p.requires_grad)
    return States(sum(map(num_bytes, parameters)), sum(map(num_bytes, gradients)), of_optimizer)


def num_bytes(value: object) -> int:
    """0 for anything but a tensor, and for a counter of steps."""
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) and value.dim() else 0


def critic_step(critic: Critic, shard: StepShard, layout: ParallelLayout) -> dict:
    """num_micro_batches, first, gradients, metrics, weights: as of the policy."""
    result = {"num_micro_batches": [len(mini) for mini in shard.critic_mini_batches]}
    with first_step_recorded(critic, result):
        result["metrics"] = critic.update(shard)
    result["weights"] = gathered(WeightSource(critic.model, layout), layout)
    return result


def estimates_by_sample(mini_batches: list[list[MicroBatch]], layout: ParallelLayout) -> dict[str, torch.Tensor]:
    """ "advantages/sample" and, of estimators per token, "returns/sample" and "values/sample", [L],
    from every rank of the last stage."""
    own = {}
    if layout.is_last_stage:
        for batch in (batch for mini in mini_batches for batch in mini):
            for name in ("advantages", "returns", "values"):
                if (values := getattr(batch, name)) is not None:
                    values = torch.where(batch.loss_mask != 0, values, 0)
                    own |= {f"{name}/{i}": row.clone() for i, row in batch.by_sample(values).items()}
    estimates: dict[str, torch.Tensor] = {}
    for name, values in (pair for part in layout.gather(own) for pair in part.items()):
        assert name not in estimates or torch.equal(estimates[name], values), f"tensor ranks differ in {name}"
        estimates[name] = values
    return estimates


def dumped(config: Config, layout: ParallelLayout, groups: list[Group] | None, shard: StepShard) -> dict | None:
    """Rank 0's records of the first groups' tokens; None with `dump_samples` 0,
    and on the others."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder)).create()
        TokenDumps(config, layout, run).write(1, groups, shard)
        dump = TokenDump.read(run.rollout_tokens(1))
    return dump and {name: torch.from_numpy(value) for name, value in vars(dump).items() if name != "texts"}


def errors_of_a_poisoned_expert(policy: Policy, mini_batches, layout: ParallelLayout) -> list[str]:
    """Each rank's error after a gradient of one expert of the last rank is not finite."""
    if layout.rank == layout.world_size - 1:
        next(expert_parameters(policy.model.chunks[-1])).register_hook(lambda gradient: gradient * math.nan)
    message = ""
    try:
        policy.update(mini_batches, weight_version=0)
    except FloatingPointError as error:
        message = str(error)
    return layout.gather(message)


def trained_source(
    model: ModelParts,
    layout: ParallelLayout,
    value: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.main_grad,
) -> WeightSource:
    """The trained parameters, weights or adapters, each with its gradient or another value. Zeros
    for a router's bias, which is not trained."""

    def value_or_zeros(parameter: torch.nn.Parameter) -> torch.Tensor:
        return value(parameter) if parameter.requires_grad else torch.zeros_like(parameter)

    return (WeightSource if model.lora is None else adapter_source)(model, layout, value_or_zeros)


@contextmanager
def first_step_recorded(learner: Policy | Critic, result: dict) -> Iterator[None]:
    """Record the start of an update's first optimizer step, on every rank. In "first": the metrics
    of its mini-batch only. In "gradients": the gradients before they are clipped, once each rank
    has all of its stage's."""
    accumulate = learner.accumulate_gradients

    def accumulate_and_record(mini_batch: MiniBatch, *loss: MicroBatchLoss) -> MetricSums | None:
        part = accumulate(mini_batch, *loss)
        if "first" not in result:
            result["first"] = metrics_of_first(learner, part)
            if not learner.state.stages[0].ddp_config.use_distributed_optimizer:
                result["gradients"] = gathered(trained_source(learner.model, learner.layout), learner.layout)
        return part

    learner.accumulate_gradients = accumulate_and_record
    yield
    del learner.accumulate_gradients


def metrics_of_first(learner: Policy | Critic, part: MetricSums | None) -> dict[str, float]:
    """The policy's are those of one rank of the last stage; the critic's those of all ranks."""
    if isinstance(learner, Critic):
        return learner.metrics_of(deepcopy(part))  # which adds the ranks' sums up in place
    metrics = None if part is None else learner.metrics_of(part)
    return next(of_rank for of_rank in learner.layout.gather(metrics) if of_rank)


def small_buckets() -> None:
    """Have Megatron reduce and gather in several buckets instead of one, overlapped with work."""
    config = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = functools.partial(config, bucket_size=4000)


def main() -> None:
    torch.set_num_threads(1)
    small_buckets()
    task = json.loads(open(sys.argv[1]).read())
    results = {}
    for name, sizes, variants in task["layouts"]:
        layout = ParallelLayout.initialize(**sizes)
        for variant, overrides in variants.items():
            start = time.monotonic()
            results[f"{name}/{variant}"] = run_variant(task["model"], layout, sizes, overrides)
            if layout.rank == 0:
                print(f"{name}/{variant}: {time.monotonic() - start:.1f} s", flush=True)
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(results, task["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
