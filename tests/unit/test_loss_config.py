"""Promises of what the config makes of the loss."""

import pytest

from megatron_dapo.algorithms.dapo_loss import metric_names
from megatron_dapo.config.loader import load_config
from megatron_dapo.training.loss_config import loss_config

pytestmark = pytest.mark.unit


def test_the_entropy_is_reported_unless_nothing_asks_for_it():
    silent = ["actor_rollout_ref.actor.calculate_entropy=false"]
    with_bonus = [*silent, "actor_rollout_ref.actor.entropy_coef=0.01"]
    reports = {"default": [], "silent": silent, "with_bonus": with_bonus}
    found = {
        name: "actor/entropy" in metric_names(loss_config(load_config(None, given)))[0]
        for name, given in reports.items()
    }
    assert found == {"default": True, "silent": False, "with_bonus": True}


@pytest.mark.parametrize(
    "overrides, threshold",
    [
        ([], None),
        (["algorithm.rollout_correction.rollout_is=token"], 2.0),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=5"], 5.0),
    ],
)
def test_the_config_says_whether_tokens_are_weighed(overrides, threshold):
    loss = loss_config(load_config(None, overrides))
    assert (loss.rollout_is_threshold, loss.off_policy) == (threshold, None)
