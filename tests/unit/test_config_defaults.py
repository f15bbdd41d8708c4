"""Keys and defaults that users of the documented interface rely on, written out here independently of the schema."""

import pytest

from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.reference import config_reference
from megatron_dapo.config.schema import Config

pytestmark = pytest.mark.unit

DOCUMENTED_DEFAULTS = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": None,
    "algorithm.dapo.enable": False,
    "algorithm.dapo.dynamic_sampling.enable": False,
    "algorithm.dapo.dynamic_sampling.filter_mode": "strict",
    "algorithm.dapo.overlong_reward_shaping.enable": False,
    "algorithm.dapo.overlong_reward_shaping.truncation_penalty": -0.5,
    "algorithm.dapo.overlong_reward_shaping.soft_penalty_mode": "additive",
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.01,
    "actor_rollout_ref.actor.use_dapo": False,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
}
DOCUMENTED_CHOICES = {
    "algorithm.dapo.dynamic_sampling.filter_mode": {"strict", "remove_all_correct", "remove_all_incorrect", "none"},
    "algorithm.dapo.overlong_reward_shaping.soft_penalty_mode": {
        "additive",
        "multiplicative",
        "replace_if_positive",
        "cap",
    },
    "actor_rollout_ref.actor.loss_agg_mode": {
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    },
    "algorithm.kl_ctrl.type": {"fixed", "adaptive"},
}


@pytest.mark.parametrize(("key", "default"), DOCUMENTED_DEFAULTS.items())
def test_a_documented_key_has_its_documented_default(key, default):
    value = Config()
    for part in key.split("."):
        value = getattr(value, part)
    assert value == default and type(value) is type(default)


@pytest.mark.parametrize(("key", "choices"), DOCUMENTED_CHOICES.items())
def test_a_documented_key_takes_its_documented_choices(key, choices):
    assert set(known_keys()[key].allowed.removeprefix("one of ").split(", ")) == choices


def test_every_key_says_what_it_means():
    silent = [key.name for key in known_keys().values() if not key.doc.strip()]
    assert silent == []


def test_the_reference_lists_every_key_once():
    reference = config_reference()
    for key in known_keys().values():
        section, _, name = key.name.rpartition(".")
        table = reference.partition(f"## {section}\n")[2].partition("\n## ")[0]
        assert table.count(f"| `{name}` |") == 1, key.name
