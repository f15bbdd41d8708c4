"""The host waits for the device at most once per optimizer step, from the first micro-batch to the reduced gradient."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dapo.config import load_config
from megatron_dapo.platform import ParallelLayout
from megatron_dapo.training import Policy, StepDistributor
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

# operations that, on a GPU, hand a value or a shape that depends on values to the host
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "repeat_interleave")


class CountWaits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        index = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name.rstrip("_2") in WAITING or any(t is not None and t.dtype == torch.bool for t in index):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.mark.parametrize("fused", ["auto", "off"])
def test_an_optimizer_step_reads_one_number_back(layout, tmp_path, fused):
    """Megatron asks once whether the global token count is above 0, however many micro-batches there are."""
    path = make_tiny(tmp_path / "tiny", "qwen2", layers=1, hidden=16, heads=2)
    config = load_config(
        None,
        [
            f"actor_rollout_ref.model.path={path}",
            f"actor_rollout_ref.actor.fused_kernels={fused}",
            "actor_rollout_ref.actor.max_tokens_per_microbatch=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
        ],
    )
    policy = Policy(config, layout)
    groups = synthetic_groups(policy.model.spec.vocab_size, num_groups=4)
    mini_batch = StepDistributor(config, layout, policy.model.spec)(0, groups).mini_batches[0]
    assert len(mini_batch) > 3
    with CountWaits() as waits:
        part = policy.accumulate_gradients(mini_batch)
    assert len(waits.seen) <= 1, waits.seen
    assert part is not None


def test_the_count_sees_what_it_should():
    x = torch.arange(4.0)
    with CountWaits() as waits:
        x.sum().item()
        x[x > 1]
        x.nonzero()
        bool(x.max() > 0)
    assert len(waits.seen) == 4
