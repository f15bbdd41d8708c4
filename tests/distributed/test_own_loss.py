"""A user's loss with the built-in formula is the built-in one, in every kind of layout and cut."""

import pytest

from tests.distributed.layout_runs import HALF_A_STEP, assert_same, cases_of, run_layouts
from tests.distributed.test_layouts import CUTS
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

ACTOR = "actor_rollout_ref.actor"
REFERENCE = ["actor_rollout_ref.ref.path=REFERENCE"]
BUILT_IN = [f"{ACTOR}.entropy_coef=0"]
WITH_KL = [*BUILT_IN, *REFERENCE, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1"]
OWN = [*BUILT_IN, f"{ACTOR}.use_dapo=false", f"{ACTOR}.loss_function=tests.loss_functions:dapo"]
OWN_WITH_KL = [*OWN, *REFERENCE, f"{ACTOR}.loss_function=tests.loss_functions:dapo_with_kl"]
RECOMPUTE = [f"{ACTOR}.megatron.recompute_granularity=full"]
LAYOUTS = {
    1: {"tp1": ({}, {"built_in": BUILT_IN, "built_in_kl": WITH_KL, "own": OWN, "own_kl": OWN_WITH_KL})},
    2: {
        "tp2": ({"tp": 2}, {"own": [*OWN, *CUTS["padded"]]}),
        "tp2_sp": ({"tp": 2, "sp": True}, {"own_kl": [*OWN_WITH_KL, *CUTS["small"]], "own": [*OWN, *RECOMPUTE]}),
        "pp2": ({"pp": 2}, {"own": [*OWN, *CUTS["small"]], "own_kl": [*OWN_WITH_KL, *RECOMPUTE]}),
        "dp2": ({}, {"own": [*OWN, *CUTS["single"]]}),  # micro-batches without sequences among them
    },
    4: {
        "tp2_pp2": ({"tp": 2, "pp": 2}, {"own": [*OWN, *CUTS["small"]]}),
        "tp2_sp_pp2_vpp2": ({"tp": 2, "sp": True, "pp": 2, "vpp": 2}, {"own_kl": [*OWN_WITH_KL, *CUTS["small"]]}),
    },
}
CASES = cases_of(LAYOUTS)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """ "layout/variant" -> the run's results."""
    folder = tmp_path_factory.mktemp("own_loss")
    shape = dict(vocab=67, layers=4, hidden=32, heads=4, kv_heads=2)
    model = make_tiny(folder / "model", "qwen3", **shape)
    reference = make_tiny(folder / "reference", "qwen3", seed=1, **shape)
    return run_layouts(folder, model, LAYOUTS, reference, overrides=HALF_A_STEP)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("tp1/")])
def test_loss_metrics_gradients_and_weights_are_those_of_one_process(results, case):
    assert_same(results[case], results[f"tp1/{case.split('/')[1]}"])


@pytest.mark.parametrize("kind", ["", "_kl"])
def test_the_built_in_loss_written_as_a_function_is_the_built_in_loss(results, kind):
    own, built_in = (dict(results[f"tp1/{name}{kind}"]) for name in ("own", "built_in"))
    both = own["metrics"].keys() & built_in["metrics"].keys()
    assert {"actor/loss", "actor/grad_norm", "actor/entropy_sampled", "actor/rollout_kl"} <= both
    names = {"own/clipfrac": "actor/on_pg_clipfrac", "own/clipfrac_lower": "actor/on_pg_clipfrac_lower"}
    names |= {"own/kl": "actor/kl_loss"} if kind else {}
    for own_name, built_in_name in names.items():
        assert own["metrics"][own_name] == pytest.approx(built_in["metrics"][built_in_name], rel=1e-5, abs=1e-6)
    for result in (own, built_in):
        result["metrics"] = {name: value for name, value in result["metrics"].items() if name in both}
    assert_same(own, built_in)
