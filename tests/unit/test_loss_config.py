"""Promises of what the config makes of the loss."""

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.training.loss_config import loss_config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "overrides, cap",
    [
        ([], None),
        (["algorithm.rollout_correction.rollout_is=token"], 2.0),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=5"], 5.0),
    ],
)
def test_the_config_says_whether_tokens_are_weighed(overrides, cap):
    loss = loss_config(load_config(None, overrides))
    assert (loss.tis_cap, loss.off_policy) == (cap, None)
