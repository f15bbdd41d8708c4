"""CISPO and GSPO: the same loss, metrics, gradients and weights in every kind of layout and cut."""

import pytest

from tests.distributed.layout_runs import assert_same, cases_of, run_layouts
from tests.distributed.test_layouts import CUTS
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

ACTOR = "actor_rollout_ref.actor"
KL = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", "actor_rollout_ref.ref.path=REFERENCE"]
CISPO = [f"{ACTOR}.policy_loss=cispo", f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.02"]
CISPO += ["exp_manager.experience_replay.enable=true", "algorithm.rollout_correction.rollout_is=token", *KL]
GSPO = [f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.clip_ratio_low=3e-3", f"{ACTOR}.clip_ratio_high=4e-3"]
GSPO += [f"{ACTOR}.clip_ratio_c=1.1", f"{ACTOR}.ppo_epochs=2"]
MEAN = [*GSPO, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "algorithm.rollout_correction.rollout_is=sequence"]
FULL_KL = [*GSPO, "algorithm.rollout_correction.rollout_is=token", *KL, f"{ACTOR}.kl_loss_type=full"]
LAYOUTS = {
    1: {"tp1": ({}, {"cispo": CISPO, "gspo": GSPO, "gspo_mean": MEAN, "gspo_kl": FULL_KL})},
    2: {
        "tp2_sp": ({"tp": 2, "sp": True}, {"cispo": CISPO, "gspo_mean": [*MEAN, *CUTS["small"]], "gspo_kl": FULL_KL}),
        "pp2": ({"pp": 2}, {"gspo": [*GSPO, *CUTS["padded"]], "gspo_kl": [*FULL_KL, *CUTS["small"]]}),
        "dp2": ({}, {"cispo": [*CISPO, *CUTS["small"]], "gspo_mean": [*MEAN, *CUTS["single"]]}),
    },
    4: {"tp2_sp_pp2_vpp2": ({"tp": 2, "sp": True, "pp": 2, "vpp": 2}, {"gspo_kl": [*FULL_KL, *CUTS["small"]]})},
}
CASES = cases_of(LAYOUTS)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """ "layout/variant" -> the run's results."""
    folder = tmp_path_factory.mktemp("policy_losses")
    shape = dict(vocab=67, layers=4, hidden=32, heads=4, kv_heads=2)
    model = make_tiny(folder / "model", "qwen3", **shape)
    reference = make_tiny(folder / "reference", "qwen3", seed=1, **shape)
    return run_layouts(folder, model, LAYOUTS, reference)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("tp1/")])
def test_loss_metrics_gradients_and_weights_are_those_of_one_process(results, case):
    assert_same(results[case], results[f"tp1/{case.split('/')[1]}"])


def test_ratios_were_clipped_and_some_were_not(results):
    """Otherwise the comparison above would be that of a policy gradient."""
    for name in ("cispo", "gspo", "gspo_mean", "gspo_kl"):
        assert 0.0 < results[f"tp1/{name}"]["metrics"]["actor/on_pg_clipfrac"] < 1.0, name
    assert results["tp1/gspo"]["metrics"]["actor/loss"] != results["tp1/gspo_mean"]["metrics"]["actor/loss"]
