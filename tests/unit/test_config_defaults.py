"""Keys and defaults of the documented interface, written out here independently of the schema."""

import pytest

from megatron_dapo.checks.unused_keys import unused_keys
from megatron_dapo.config.key_reference import config_reference
from megatron_dapo.config.keys import known_keys, may_change_on_resume
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.rules import Is, IsNot, IsOn

pytestmark = pytest.mark.unit


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
    for key in ("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.quantization", "trainer.seed"):
        assert not may_change_on_resume(key)
