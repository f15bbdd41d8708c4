"""Keys and defaults of the documented interface, written out here independently of the schema."""

import pytest

from megatron_dapo.checks.unused_keys import unused_keys
from megatron_dapo.config.key_reference import config_reference
from megatron_dapo.config.keys import known_keys, may_change_on_resume
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.rules import Is, IsNot, IsOn

pytestmark = pytest.mark.unit

DOCUMENTED_DEFAULTS = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": None,
    "algorithm.dynamic_sampling.enable": False,
    "algorithm.dynamic_sampling.filter_mode": "strict",
    "algorithm.overlong_reward_shaping.enable": False,
    "algorithm.overlong_reward_shaping.truncation_penalty": -0.5,
    "algorithm.overlong_reward_shaping.soft_penalty_mode": "additive",
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
    "algorithm.dynamic_sampling.filter_mode": {
        "strict",
        "remove_all_correct",
        "remove_all_incorrect",
        "none",
        "acc",
        "score",
        "seq_reward",
        "seq_final_reward",
    },
    "algorithm.overlong_reward_shaping.soft_penalty_mode": {
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
        assert table.count(f"\n| `{name}` |") == 1, key.name


def test_a_rule_is_about_keys_and_values_that_there_are():
    rules = [rule for key in known_keys().values() for rule in key.rules.acts_if]
    assert len(rules) > 30
    for rule in rules:
        for condition in rule.conditions:
            key = known_keys()[condition.key]
            values = condition.values if isinstance(condition, Is) else ()
            values += (condition.value,) if isinstance(condition, IsNot) else ()
            assert not isinstance(condition, IsOn) or key.default is False
            for value in values:
                load_config(None, [f"{key.name}={'null' if value is None else str(value).lower()}"])


def test_an_unused_key_is_a_mistake_of_its_own_and_of_the_keys_that_keep_it_from_being_read():
    settings = ["algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward=false", "critic.optim.lr=1e-4"]
    first, second = unused_keys(load_config(None, settings), known_keys().values())
    assert first.startswith("critic.optim.lr is ") and "while algorithm.adv_estimator is grpo" in first
    assert second.startswith("algorithm.kl_ctrl.kl_coef is ") and "while algorithm.use_kl_in_reward is" in second


def test_a_section_that_may_change_on_resume_frees_all_its_keys():
    assert may_change_on_resume("weight_sync.verify") and may_change_on_resume("actor_rollout_ref.rollout.server.host")
    assert not may_change_on_resume("actor_rollout_ref.rollout.n") and not may_change_on_resume("trainer.seed")
