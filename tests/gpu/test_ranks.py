"""One rollout step at layouts of two ranks over NCCL: metrics, gradients and weights of one rank, in float32.

Ranks may share a GPU (tests/gpu/first/ranks): then their times mean nothing. Context parallelism is not among them: on
GPUs it needs Transformer Engine and bfloat16.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: the kernels are tested without it", allow_module_level=True)

from tests.distributed.layout_runs import Layouts, assert_same, cases_of
from tests.helpers import run_torchrun
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parents[1]
M = "actor_rollout_ref.actor.megatron"
MIXTURE = "actor_rollout_ref.model.path=MIXTURE"
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


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("ranks")
    dense = make_tiny(folder / "dense", "qwen3", vocab=67, layers=4, hidden=32, heads=8, kv_heads=4)
    mixture = make_tiny(folder / "mixture", "qwen3_moe", vocab=67, layers=2, hidden=32, heads=4, kv_heads=2)
    results: dict[str, dict] = {}
    for world, of_world in LAYOUTS.items():
        out, task = folder / f"{world}.pt", folder / f"{world}.json"
        rows = [(name, sizes, variants) for name, (sizes, variants) in of_world.items()]
        text = json.dumps({"model": str(dense), "out": str(out), "layouts": rows})
        task.write_text(text.replace("MIXTURE", str(mixture)))
        with pytest.MonkeyPatch.context() as patch:
            if torch.cuda.device_count() < world:
                patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "gpu/first/ranks"), *_python_path()]))
                patch.setenv("NCCL_SOCKET_IFNAME", "lo")
            run_torchrun(TESTS / "distributed/layout_worker.py", world, str(task))
        results |= torch.load(out, map_location="cpu")
    return results


def _python_path() -> list[str]:
    return list(filter(None, [os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize("case", cases_of({2: LAYOUTS[2]}))
def test_two_ranks_over_nccl_take_the_step_of_one(results, case):
    model = case.split("/")[1].split(",")[0]
    assert_same(results[case], results[f"one/{model}"])
