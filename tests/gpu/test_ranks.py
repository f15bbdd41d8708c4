"""One rollout step at layouts of two ranks over NCCL: metrics, gradients and weights are one
rank's, in float32.

Ranks may share a GPU (tests/gpu/first/ranks): then their times mean nothing. Context parallelism is
not among them: on GPUs it needs Transformer Engine and bfloat16 (below).
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: the kernels are tested without it", allow_module_level=True)

from tests.distributed.layout_runs import Layouts, assert_same, cases_of, run_layouts
from tests.helpers import run_torchrun
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu

RANKS = Path(__file__).with_name("first") / "ranks"
M = "actor_rollout_ref.actor.megatron"
MIXTURE = "actor_rollout_ref.model.path=OTHER(mixture)"
SMALL = ["actor_rollout_ref.actor.max_tokens_per_microbatch=96"]
SHARDED = [f"{M}.use_distributed_optimizer=true"]
OVERLAP = [*SHARDED, f"{M}.overlap_grad_reduce=true", f"{M}.overlap_param_gather=true"]
SP = {"tp": 2, "sp": True}
LAYOUTS: Layouts = {
    1: {"one": ({}, {"dense": [], "mixture": [MIXTURE]})},
    2: {
        "tp2_sp": (SP, {"dense": SMALL, "dense, composed": ["actor_rollout_ref.actor.fused_kernels=off", *SMALL]}),
        "pp2_vpp2": ({"pp": 2, "vpp": 2}, {"dense": SMALL}),
        "dp2": ({}, {"dense": SMALL, "dense, overlap": [*OVERLAP, *SMALL]}),
        "tp2_sp_ep2": (SP | {"ep": 2}, {"mixture": [MIXTURE, *SMALL]}),
        "tp2_sp_etp2": (SP | {"etp": 2}, {"mixture": [MIXTURE, *SMALL]}),
        "dp2_ep2": ({"ep": 2}, {"mixture, overlap": [MIXTURE, *OVERLAP, *SMALL]}),
    },
}
# on GPUs context parallelism needs both
ITS = [f"{M}.use_transformer_engine=on", f"{M}.dtype=bfloat16", *SHARDED]
CONTEXT: Layouts = {1: {"one": ({}, {"wide": ITS})}, 2: {"cp2": ({"cp": 2}, {"wide": [*ITS, *SMALL]})}}


def over_nccl(path: Path, world: int, task: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() < world:
            there = filter(None, [os.environ.get("PYTHONPATH")])
            patch.setenv("PYTHONPATH", os.pathsep.join([str(RANKS), *there]))
            patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        return run_torchrun(path, world, task)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": make_tiny(folder / "dense", "qwen3", vocab=67, layers=4, hidden=32, heads=8, kv_heads=4),
        "mixture": make_tiny(folder / "mixture", "qwen3_moe", vocab=67, layers=2, hidden=32, heads=4, kv_heads=2),
        # heads of 64: those for which Transformer Engine's ring has a kernel
        "wide": make_tiny(folder / "wide", "qwen3", vocab=67, layers=4, hidden=256, heads=4, kv_heads=2),
    }


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict[str, dict]:
    others = {"mixture": models["mixture"]}
    return run_layouts(tmp_path_factory.mktemp("ranks"), models["dense"], LAYOUTS, others=others, start=over_nccl)


@pytest.mark.parametrize("case", cases_of({2: LAYOUTS[2]}))
def test_two_ranks_over_nccl_take_the_step_of_one(results, case):
    model = case.split("/")[1].split(",")[0]
    assert_same(results[case], results[f"one/{model}"])


@pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="no transformer_engine")
def test_context_parallel_ranks_are_near_one(models, tmp_path):
    """In bfloat16: another order of sums, in terms that cancel."""
    results = run_layouts(tmp_path, models["wide"], CONTEXT, start=over_nccl)
    got, expected = results["cp2/wide"]["metrics"], results["one/wide"]["metrics"]
    assert got["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=2e-2)
    assert got["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-1)
