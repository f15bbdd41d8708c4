"""Demands of multi-turn rollouts on the config: every contradiction is one sentence,
with key and cure."""

import pytest

from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config

pytestmark = pytest.mark.unit

KEY = "actor_rollout_ref.rollout.multi_turn"
ON = (f"{KEY}.enable=true", f"{KEY}.environment=reasoning_gym")


def sentences(*overrides):
    try:
        validate(load_config(None, list(overrides)), None, check_files=False)
    except UserError as error:
        return error.sentences
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ON,
        (f"{KEY}.enable=true", f"{KEY}.environment=my_games.chess:Board", "reward.function=environment"),
        (*ON, f"{KEY}.max_tokens_per_turn=128", f"{KEY}.environment_kwargs.role=user", f"{KEY}.max_turns=1"),
        ("reward.function=reasoning_gym",),
        (f"{KEY}.environment=reasoning_gym", f"{KEY}.max_turns=3", f"{KEY}.enable=false"),
    ],
)
def test_what_fits_together_is_taken(overrides):
    assert sentences(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{KEY}.enable=true",), ["environment is ''", "neither reasoning_gym nor"]),
        ((f"{KEY}.enable=true", f"{KEY}.environment=reasoning_gim"), ["the nearest is reasoning_gym"]),
        ((f"{KEY}.environment=reasoning_gym",), ["has no effect while", "set enable to true"]),
        ((f"{KEY}.max_turns=3",), ["max_turns is 3", "has no effect while"]),
        (
            (*ON, f"{KEY}.max_tokens_per_turn=2048"),
            ["max_tokens_per_turn is 2048", "below data.max_response_length 2048"],
        ),
        ((*ON, f"{KEY}.step_timeout_s=700.0"), ["step_timeout_s is 700", "timeout_s 600"]),
        ((*ON, f"{KEY}.timeout_s=8000.0"), ["timeout_s is 8000", "actor_rollout_ref.rollout.step_timeout_s 7200"]),
        (("reward.function=environment",), ["reward.function is environment", f"set {KEY}.enable or"]),
    ],
)
def test_a_contradiction_is_one_sentence(overrides, words):
    (sentence,) = sentences(*overrides)
    assert all(word in sentence for word in words), sentence


def test_the_plan_says_who_plays():
    assert "environments  reasoning_gym: 16 processes, 30 s per answer, at most 16 turns" in process_plan(
        load_config(None, list(ON))
    )
    assert "environments" not in process_plan(load_config(None, []))
