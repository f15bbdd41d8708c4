"""Training with everything parked after each step ends in the same bits as without, at every
layout; nothing of it is on the device meanwhile.

One start per number of processes runs all its layouts (see parked_worker).
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.layout_runs import Layouts, cases_of, restricted, run_layouts
from tests.forked_ranks import run_ranks
from tests.proofs import few
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

MEGATRON = "actor_rollout_ref.actor.megatron"
SMALL = "actor_rollout_ref.actor.max_tokens_per_microbatch=96"
SHARDED = [SMALL, f"{MEGATRON}.use_distributed_optimizer=true"]
GATHERED = [*SHARDED, f"{MEGATRON}.overlap_grad_reduce=true", f"{MEGATRON}.overlap_param_gather=true"]
BF16 = f"{MEGATRON}.dtype=bfloat16"
KL = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
REFERENCE = [*KL, "actor_rollout_ref.ref.path=REFERENCE"]
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=6"]
CRITIC = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.max_tokens_per_microbatch=96"]
SP = {"tp": 2, "sp": True}
LAYOUTS: Layouts = {
    2: {
        "tp2": (SP, {"float32": [SMALL, *REFERENCE], "bfloat16": [SMALL, BF16], "critic": [SMALL, *CRITIC]}),
        "pp2_vpp2": ({"pp": 2, "vpp": 2}, {"float32": [SMALL], "bfloat16": [*SHARDED, BF16, *REFERENCE]}),
        "dp2": (
            {},
            {
                "float32": GATHERED,
                "bfloat16": [*GATHERED, BF16],
                "whole": [SMALL, BF16],
                "critic": [*SHARDED, BF16, *CRITIC],
                "lora": [*SHARDED, BF16, *LORA, *KL],
            },
        ),
    },
}
MIXTURE_LAYOUTS: Layouts = {
    2: {"dp2_ep2": ({"ep": 2}, {"float32": [SMALL], "bfloat16": [*SHARDED, BF16], "lora": [SMALL, *LORA]})}
}
# each layout, type, optimizer and kind of model once; all of them in proofs
FIRST = ("tp2/float32", "pp2_vpp2/bfloat16", "dp2/bfloat16", "dp2/critic", "dp2/lora")
FIRST_OF_MIXTURE = ("dp2_ep2/bfloat16", "dp2_ep2/lora")
REST = 0.1
"""Of the parked bytes, that may stay: rotary tables, counters, and a mixture's last hidden states.
Forgotten moments, gradients or main weights would be a fifth."""


def beginning_with(first: Sequence[str], layouts: Layouts) -> Sequence[str]:
    return few(sorted(cases_of(layouts), key=lambda case: case not in first), len(first))


CASES = beginning_with(FIRST, LAYOUTS)
MIXTURE_CASES = beginning_with(FIRST_OF_MIXTURE, MIXTURE_LAYOUTS)


def run(folder: Path, model: Path, layouts: Layouts) -> dict[str, dict]:
    def start(_: Path, nproc: int, task: str) -> str:
        return run_ranks(Path(__file__).with_name("parked_worker.py"), nproc, task)

    return run_layouts(folder, model, layouts, shutil.copytree(model, folder / "reference"), start=start)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("parked")
    shape = dict(vocab=67, layers=4, hidden=64, heads=4, kv_heads=2, tied=True)
    return run(folder, make_tiny(folder / "model", "qwen3", **shape), restricted(LAYOUTS, CASES))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("mixture")
    shape = dict(vocab=67, layers=2, hidden=64, heads=4, kv_heads=2, num_experts=4)
    return run(folder, make_tiny(folder / "model", "qwen3_moe", **shape), restricted(MIXTURE_LAYOUTS, MIXTURE_CASES))


def check(ranks: list[dict]) -> None:
    for rank in ranks:
        assert all(rank["equal"]) and len(rank["equal"]) > 20
        assert all(rank["pushes_equal"]) and len(rank["pushes_equal"]) == 4 and rank["has_learned"]
        for needed, copied, left in rank["parks"]:
            assert needed > copied > 0 and left < REST * needed
        assert rank["parks"][-1][0] > rank["num_bytes"] / 2  # some tensors share storages


@pytest.mark.parametrize("case", CASES)
def test_steps_with_everything_parked_between_them_end_in_the_same_bits(results, case):
    check(results[case]["ranks"])


@pytest.mark.parametrize("case", MIXTURE_CASES)
def test_experts_and_their_own_buffers_are_parked_too(mixture, case):
    check(mixture[case]["ranks"])
