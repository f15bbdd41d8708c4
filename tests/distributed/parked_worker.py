"""Run on every rank: steps of training with everything parked between them, and without; saved by
rank 0: whether both ended in the same bits, and what was on the device meanwhile.

Arguments: as of layout_worker.
"""

import json
import sys
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.kl import FixedKLController
from megatron_dapo.config.derived import needs_reference, uses_critic
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.lora_settings import actor_is_reference
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.critic import Critic
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.parked import Parked
from megatron_dapo.training.policy import Policy
from megatron_dapo.training.reference import ActorAsReference, Reference
from tests.distributed.layout_worker import COMMON, gathered, small_buckets
from tests.distributed.process_groups import leave
from tests.live_bytes import resident_storages
from tests.synthetic import synthetic_groups

NUM_STEPS = 3
TWICE = 1  # the step with a second push, in the middle of the sampling after it


class Models:
    """The models of a config."""

    def __init__(self, config: Config, layout: ParallelLayout) -> None:
        self.policy = Policy(config, layout)
        self.reference: Reference | ActorAsReference | None = None
        if needs_reference(config):
            is_own = actor_is_reference(config)
            self.reference = ActorAsReference(config, self.policy) if is_own else Reference(config, layout)
        self.critic = Critic(config, layout) if uses_critic(config) else None
        self.distributor = StepDistributor(config, layout, self.policy.model.spec)

    def step(self, config: Config, layout: ParallelLayout, step: int) -> None:
        """Score and update, as the job does."""
        groups = synthetic_groups(self.policy.model.spec.vocab_size, seed=step) if layout.rank == 0 else None
        shard = self.distributor(step, groups)
        if self.reference is not None:
            shard = shard.with_mini_batches(self.reference.score(shard.mini_batches))
        shard = shard.with_mini_batches(self.policy.score(shard.mini_batches))
        if self.critic is not None:
            shard = self.critic.score(shard)
        controller = FixedKLController(config.algorithm.kl_ctrl.kl_coef)
        shard, _ = estimate_advantages(shard, controller, config, layout)
        if self.critic is not None:
            self.critic.update(shard)
        self.policy.update(shard.mini_batches, weight_version=step)

    def trained(self) -> list[Policy | Critic]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Weights, main weights and moments, by the ways of Megatron's checkpoints."""
        trained = self.trained()
        frozen = [self.reference] if isinstance(self.reference, Reference) else []
        for role in (*trained, *frozen):
            for chunk in role.model.chunks:
                yield from chunk.parameters()
        for optimizer in (role.state.optimizer for role in trained):
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                for group in part.optimizer.param_groups:
                    yield from group["params"]
                for state in part.optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def gradients(self) -> Iterator[torch.Tensor]:
        for chunk in (chunk for role in self.trained() for chunk in role.model.chunks):
            yield from (parameter.main_grad for parameter in chunk.parameters() if parameter.requires_grad)


def train(config: Config, layout: ParallelLayout, parks: bool) -> dict:
    """Return the final tensors and the pushed ones; of each park (needed, copied, left): bytes
    to restore, copied in its second half, and of all this training's storages still there."""
    known = weakref.WeakSet(resident_storages())
    models = Models(config, layout)
    roles = [models.policy, models.reference, models.critic]
    parked = Parked(roles, params=True, optimizer=True) if parks else None
    pushed, all_parks = [], []
    for step in range(NUM_STEPS):
        models.step(config, layout, step)
        for _ in range(2 if parked and step == TWICE else 1):
            if parked:
                parked.park_states()
            pushed.append({name: t.clone() for name, t in gathered(models.policy.weight_source(), layout).items()})
            if parked:
                parked.park_weights()
                held = [tensor.untyped_storage() for tensor in (*models.tensors(), *models.gradients())]
                assert held and not any(storage.nbytes() for storage in held)
                known.update(tensor.untyped_storage() for tensor in pushed[-1].values())
                left = sum(storage.nbytes() for storage in resident_storages() if storage not in known)
                all_parks.append((parked.needed_bytes(), parked.num_bytes, left))
                parked.restore()
    tensors = [tensor.detach().clone() for tensor in models.tensors()]
    return {"tensors": tensors, "pushed": pushed, "parks": all_parks}


def compared(config: Config, layout: ParallelLayout) -> dict:
    """Return what rank 0 saves of both trainings."""
    plain, parked = train(config, layout, parks=False), train(config, layout, parks=True)
    first, again = parked["pushed"].pop(TWICE + 1), parked["pushed"][TWICE]
    pairs = zip(plain["tensors"], parked["tensors"], strict=True)
    pushes = [(first, again), *zip(plain["pushed"], parked["pushed"], strict=True)]
    own = {
        "equal": [a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs],
        "pushes_equal": [a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pushes],
        "has_learned": any(not torch.equal(plain["pushed"][0][n], plain["pushed"][-1][n]) for n in plain["pushed"][0]),
        "num_bytes": sum(tensor.nbytes for tensor in parked["tensors"]),
        "parks": parked["parks"],
    }
    return {"ranks": layout.gather(own)}


def main() -> None:
    torch.set_num_threads(1)
    small_buckets()
    task = json.loads(open(sys.argv[1]).read())
    results = {}
    for name, sizes_, variants in task["layouts"]:
        layout = ParallelLayout.initialize(**sizes_)
        for variant, overrides in variants.items():
            parallel = [f"actor_rollout_ref.actor.megatron.{NAMES[k]}={v}" for k, v in sizes_.items() if k in NAMES]
            parallel.append(f"trainer.n_procs_per_node={layout.world_size}")
            config = load_config(
                None, [*COMMON, f"actor_rollout_ref.model.path={task['model']}", *parallel, *overrides]
            )
            results[f"{name}/{variant}"] = compared(config, layout)
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(results, task["out"])
    dist.destroy_process_group()


NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


if __name__ == "__main__":
    main()
