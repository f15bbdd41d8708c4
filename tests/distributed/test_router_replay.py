"""Loss, metrics, gradients and weights of replayed routing do not depend on the cut
of a rollout step.

The servers' experts are drawn by lot: a rank with those of another token, layer or micro-batch
computes something else. The layouts have several micro-batches under way together, and compute them
again in backward.
"""

import pytest

from tests.distributed.layout_runs import Layouts, assert_same_as, cases_of, run_layouts
from tests.distributed.test_layouts import CUTS, RECOMPUTE
from tests.proofs import PROOFS
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

REPLAYED = {mode: [f"actor_rollout_ref.actor.router_replay={mode}"] for mode in ("rollout", "old")}
ROLLOUT = [*REPLAYED["rollout"], *CUTS["small"]]
OLD = [*REPLAYED["old"], *CUTS["small"]]
GPT_OSS = ["actor_rollout_ref.model.path=OTHER(gpt_oss)", *REPLAYED["rollout"]]  # its routers have biases
HYBRID = ["actor_rollout_ref.model.path=OTHER(hybrid)", *REPLAYED["rollout"]]  # other layers between its routers
LATENT = ["actor_rollout_ref.model.path=OTHER(latent)", *REPLAYED["rollout"]]  # its routers choose groups of experts
# its recurrence too is computed again in backward
HYBRID_RECOMPUTED = {"hybrid/recomputed": [*HYBRID, *CUTS["small"], *RECOMPUTE["recompute_selective"]]}
OF_ONE_KIND = HYBRID_RECOMPUTED if PROOFS else {}  # the layout of all kinds stands for them
LAYOUTS: Layouts = {
    1: {
        "tp1": (
            {},
            {
                "rollout/whole": REPLAYED["rollout"],
                "old/whole": REPLAYED["old"],
                "off/whole": [],
                "gpt_oss/whole": GPT_OSS,
                "latent/whole": LATENT,
                "hybrid/whole": HYBRID,
                "rollout/recomputed": [*ROLLOUT, *RECOMPUTE["recompute_full"]],
            },
        )
    },
    2: {
        "tp2_sp_ep2": (
            {"tp": 2, "sp": True, "ep": 2},
            {
                "rollout/padded": [*REPLAYED["rollout"], *CUTS["padded"]],
                "old/small": OLD,
                "gpt_oss/recomputed": [*GPT_OSS, *CUTS["small"], *RECOMPUTE["recompute_full"]],
                "latent/recomputed": [*LATENT, *CUTS["small"], *RECOMPUTE["recompute_full"]],
                **OF_ONE_KIND,
            },
        ),
        "tp2_sp_etp2": ({"tp": 2, "sp": True, "etp": 2}, {"old/small": OLD}),
        "cp2_ep2": (
            {"cp": 2, "ep": 2},
            {"rollout/recomputed": [*ROLLOUT, *RECOMPUTE["recompute_selective"]], **OF_ONE_KIND},
        ),
        "pp2_vpp2": (
            {"pp": 2, "vpp": 2},
            {
                "rollout/recomputed": [*ROLLOUT, *RECOMPUTE["recompute_full"]],
                "rollout/uneven": [*ROLLOUT, "actor_rollout_ref.actor.megatron.pipeline_layers=[0, 2, 1, 1]"],
                "old/small": OLD,
            },
        ),
    },
    4: {
        "tp2_sp_pp2_ep2": (
            {"tp": 2, "sp": True, "pp": 2, "ep": 2},
            {"rollout/recomputed": [*ROLLOUT, *RECOMPUTE["recompute_selective"]]},
        ),
        "tp2_sp_cp2_ep2": ({"tp": 2, "sp": True, "cp": 2, "ep": 2}, HYBRID_RECOMPUTED),
        "pp2_dp2_ep2": (
            {"pp": 2, "ep": 2},
            {"old/recomputed": [*OLD, *RECOMPUTE["recompute_full"]], "rollout/small": ROLLOUT},
        ),
        "cp2_dp2_ep2_etp2": (
            {"cp": 2, "ep": 2, "etp": 2},
            {"rollout/recomputed": [*ROLLOUT, *RECOMPUTE["recompute_selective"]]},
        ),
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """ "layout/mode/cut" -> the run's results."""
    folder = tmp_path_factory.mktemp("routed")
    # the first layer is dense, and a bias has a say in the routers' own choice
    shape = dict(vocab=67, layers=4, hidden=32, heads=4, kv_heads=2)
    families = ("glm4_moe", "gpt_oss", "deepseek_v3")
    model, gpt_oss, latent = (make_tiny(folder / family, family, **shape) for family in families)
    hybrid = make_tiny(folder / "hybrid", "qwen3_5_moe", **shape | {"layers": 2})  # a layer of each kind
    return run_layouts(folder, model, LAYOUTS, others={"gpt_oss": gpt_oss, "latent": latent, "hybrid": hybrid})


@pytest.mark.parametrize("case", cases_of(LAYOUTS))
def test_replayed_routing_equals_one_process(results, case):
    mode = case.split("/")[1]
    assert_same_as(results, case, f"tp1/{mode}/whole")
    # the policy is the old policy, to the bit
    assert results[case]["first"]["actor/ratio_max"] == 1.0


def test_lots_are_other_experts_than_the_routers_choose_and_recorded_ones_are_the_same(results):
    """Of 8 experts two are drawn: 27 of 28 pairs are others.
    The second of two mini-batches meets moved weights."""
    for mode in ("rollout", "hybrid"):
        assert results[f"tp1/{mode}/whole"]["metrics"]["actor/router_mismatch"] > 0.9
    assert 0.0 < results["tp1/old/whole"]["metrics"]["actor/router_mismatch"] < 0.1
    assert "actor/router_mismatch" not in results["tp1/off/whole"]["metrics"]
    losses = {mode: results[f"tp1/{mode}/whole"]["metrics"]["actor/entropy"] for mode in ("rollout", "old", "off")}
    assert abs(losses["rollout"] - losses["off"]) > 1e-3 and losses["old"] == pytest.approx(losses["off"], rel=1e-3)
