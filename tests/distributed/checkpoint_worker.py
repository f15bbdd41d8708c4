"""Run on every rank: trains, saves and loads at several layouts in turn; rank 0 saves the results.

Arguments: a JSON file with {"out": path, "cases": [case, ...]};
see `run_case` for the keys of a case.
"""

import json
import random
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_dapo.checkpointing import manifest, resume
from megatron_dapo.checkpointing.torch_dist import writer
from megatron_dapo.checkpointing.torch_dist.loading import load
from megatron_dapo.checkpointing.torch_dist.saving import save
from megatron_dapo.common.errors import JobError, UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.policy import Policy
from tests.distributed.layout_worker import gathered, trained_source
from tests.distributed.process_groups import leave
from tests.synthetic import synthetic_groups

COMMON = [
    "data.train_batch_size=4",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_dapo=true",
    "actor_rollout_ref.actor.entropy_coef=0.01",
    "actor_rollout_ref.actor.max_tokens_per_microbatch=64",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.eps=1e-2",  # see layout_worker
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    "actor_rollout_ref.actor.optim.lr_decay_style=cosine",
    "trainer.total_training_steps=20",
]
SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
SIZES |= {"cp": "context_parallel_size"}
SIZES |= {"etp": "expert_tensor_parallel_size"}
SIZES |= {"vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size", "sp": "sequence_parallel"}
SIZES |= {"pipeline_layers": "pipeline_layers"}
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"  # the optimizer's own copy of a half-precision parameter


class Run:
    """A policy on made-up batches; step s has the same batch in every run."""

    def __init__(self, case: dict, layout: ParallelLayout) -> None:
        overrides = [f"actor_rollout_ref.actor.megatron.{SIZES[k]}={json.dumps(v)}" for k, v in case["sizes"].items()]
        sharded = str(case.get("sharded", False)).lower()
        overrides.append(f"actor_rollout_ref.actor.megatron.use_distributed_optimizer={sharded}")
        overrides.append(f"actor_rollout_ref.actor.megatron.dtype={case.get('dtype', 'float32')}")
        overrides += case.get("overrides", ())
        self.layout = layout
        self.config = load_config(None, [*COMMON, f"actor_rollout_ref.model.path={case['model']}", *overrides])
        self.policy = Policy(self.config, layout)
        self.distribute = StepDistributor(self.config, layout, self.policy.model.spec)
        self.training = {"optimizer": self.policy.state.optimizer, "lr_schedule": self.policy.state.lr_schedule}

    def step(self, step: int) -> dict[str, float]:
        vocab = self.policy.model.spec.vocab_size
        groups = synthetic_groups(vocab, num_groups=4, n=2, seed=step) if self.layout.rank == 0 else None
        shard = self.distribute(step, groups)
        return self.policy.update(self.policy.score(shard.mini_batches), weight_version=step)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments of everything trained, whole, under Hugging Face's or PEFT's names,
        on every rank."""
        names = (*MOMENTS, MAIN) if self.policy.model.config.bf16 else MOMENTS
        moments = {name: _moments(self.policy, self.layout, name) for name in names}
        whole = gathered(trained_source(self.policy.model, self.layout, torch.nn.Parameter.detach), self.layout)
        if self.policy.model.lora is None:
            # biases of routers, which are not trained, too
            whole |= gathered(self.policy.weight_source(), self.layout)
        for name, values in moments.items():
            source = trained_source(self.policy.model, self.layout, lambda p, values=values: values[p])
            whole |= {f"{name}.{key}": value for key, value in gathered(source, self.layout).items()}
        return whole

    def everything(self) -> list[list[torch.Tensor]]:
        """Of every rank its own parameters, optimizer tensors and counts, bit for bit."""
        own = [p.detach().clone() for chunk in self.policy.model.chunks for p in chunk.parameters()]
        for part in self.policy.state.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    own += [parameter.detach().clone(), *(state[key].clone() for key in sorted(state))]
        ranks: list = [None] * self.layout.world_size
        dist.all_gather_object(ranks, own, group=self.layout.cpu_group)
        return ranks


def _moments(policy: Policy, layout: ParallelLayout, name: str) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Parameter -> its moments, whole: a sharded optimizer's put together
    by a sum over the data-parallel ranks."""
    moments = {}
    for part in policy.state.optimizer.chained_optimizers:
        if not hasattr(part, "gbuf_ranges"):
            mains = zip(part.get_parameters(), part.get_parameters(), strict=True)
            if hasattr(part, "float16_groups"):
                halves = [p for group in part.float16_groups for p in group]
                mains = [(p, p.main_param) for p in halves]
            moments |= {p: main.detach() if name == MAIN else part.optimizer.state[main][name] for p, main in mains}
            continue
        sums = {p: torch.zeros(p.shape) for buffer in part.buffers for p in buffer.params}
        for buckets in (b for ranges in part.gbuf_ranges for b in ranges.values()):
            for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                group, index = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][index]
                target = sums[parameter].view(-1)[ranges["param"].start : ranges["param"].end]
                target.copy_(main.detach() if name == MAIN else part.optimizer.state[main][name])
        for value in sums.values():
            dist.all_reduce(value, group=part.data_parallel_group)
        moments |= sums
    return moments


def run_case(case: dict, layout: ParallelLayout) -> dict:
    """model, sizes, sharded, dtype, overrides: of the run. load: a checkpoint to start from. steps:
    [first, end) before the save. save: its folder. background: training goes on during the save.
    more: end of the steps after that. failing_rank: which rank's writes fail. weights_only: save
    without, load without the optimizer."""
    if "stock" in case:  # Megatron's own view, without this program
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load_plain_tensors(case["load"])
    if "verify" in case:
        return {"ranks": _verified(Path(case["verify"]), layout)}
    run, result = Run(case, layout), {}
    training = {} if case.get("weights_only") else run.training
    if "load" in case:
        try:
            adapters = run.policy.model.lora is not None
            result["report"] = vars(load(Path(case["load"]), run.policy.model, layout, **training, adapters=adapters))
        except UserError as error:
            return {"error": str(error)}
    first, end = case.get("steps", (0, 0))
    metrics = {step: run.step(step) for step in range(first, end)}
    if "failing_rank" in case:
        return {"errors": [_failed_save(case, run, background) for background in (False, True)]}
    if "save" in case:
        pending = save(
            Path(case["save"]), run.policy.model, layout, background=case.get("background", False), **training
        )
    result["draws"] = [random.random(), float(np.random.rand()), float(torch.rand(())), _tracker_draw()]
    if "save" not in case or not case.get("background"):
        result["tensors"] = {} if case.get("weights_only") else run.tensors()
    result["polls"] = 0
    for step in range(end, case.get("more", end)):
        metrics[step] = run.step(step)
        if "save" in case:
            result["polls"] += pending.is_done()
    if "save" in case:
        pending.finish()
        result["files"] = sorted(path.name for path in Path(case["save"]).glob("*.distcp"))
    return {**result, "metrics": metrics, "everything": run.everything()}


def _verified(folder: Path, layout: ParallelLayout) -> list[tuple[tuple[str, ...], list[str]]]:
    """Of every rank: the damage that it knows of, and the files that it has read."""
    read: list[str] = []

    def compare_contents(folder: Path, files: dict) -> list[str]:
        read.extend(files)
        return manifest.compare_contents(folder, files)

    resume.compare_contents = compare_contents
    return layout.gather((resume.verify_on_all_ranks(folder, layout.agreement).damage, read))


def _tracker_draw() -> float:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        return float(torch.rand(()))


def _failed_save(case: dict, run: Run, background: bool) -> list[str]:
    """Every rank's error if the operating system refuses to write one rank's file."""
    folder = Path(f"{case['save']}-{background}")
    if run.layout.rank == case["failing_rank"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    error = "nothing"
    try:
        save(folder, run.policy.model, run.layout, background=background, **run.training).finish()
    except JobError as failure:
        error = str(failure)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    errors: list = [None] * run.layout.world_size
    dist.all_gather_object(errors, error, group=run.layout.cpu_group)
    run.step(99)  # the run itself is well
    return [*errors, "complete" if (folder / "metadata.json").exists() else "incomplete"]


def main() -> None:
    torch.set_num_threads(1)
    writer.FILE_BYTES = 100_000  # several files per rank
    task = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for case in task["cases"]:
        sizes = {name: size for name, size in case["sizes"].items() if name != "pipeline_layers"}
        layout = ParallelLayout.initialize(**sizes)
        start = time.monotonic()
        results[case["name"]] = run_case(case, layout)
        if layout.rank == 0:
            print(f"{case['name']}: {time.monotonic() - start:.1f} s", flush=True)
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(results, task["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
