"""A refused value hides the mistakes that hang on it, and no other."""

import re
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.key_names import ACTOR, CORRECTION, LOSS_FUNCTION, MEGATRON, OVERLONG, POLICY_LOSS, USE_DAPO
from megatron_dapo.config.keys import Key, known_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe as path_of
from tests.config_overrides import SOUND, overrides
from tests.unit.test_config_validation import CONTRADICTIONS

pytestmark = pytest.mark.unit

NUMBERS = ("0", "-1", "1", "2", "3", "7", "64", "512", "2000", "100000", "0.01", "0.2", "0.25", "0.5", "1.2", "8000")
TEXTS = ("null", "x", "environment", "calculator", "math_dapo", "my.rewards:score", "[]", "[x]", "[train.jsonl]",
         "[http://127.0.0.1:1]", "[wandb]", "[console]", "['trainer.seed']", "[optimizer]", "[1]",
         "[0.9, 0.9]")  # fmt: skip

PADDED = (
    "megatron.fp8=hybrid megatron.fp8_recipe=blockwise data.max_response_length=2000 "
    "actor.max_tokens_per_microbatch=3024"
)


def shown(settings: list[str], recipe: Path | None = None) -> list[str]:
    try:
        load_and_validate(recipe, settings, check_files=False)
    except UserError as error:
        return error.sentences
    return []


def refused(key: str) -> str:
    """An override with a value that no key takes."""
    section, _, last = key.rpartition(".")
    return f"{section}={{{last}: [[[1]]]}}"


@cache
def other_values(name: str) -> list[str]:
    """Values that the key takes, from all over its range."""
    key = known_keys()[name]
    if key.annotation is bool:
        return ["true", "false"]
    if get_origin(key.annotation) is Literal:
        return list(get_args(key.annotation))
    values = [value for value in (*NUMBERS, *TEXTS) if takes(key, value)]
    assert values
    return values


def takes(key: Key, value: str) -> bool:
    try:
        load_config(None, [f"{key.name}={value}"])
    except UserError:
        return False
    return True


def test_one_more_mistake_is_one_more_sentence():
    three = shown_with_files("trainer.critic_warmup=3")
    assert len(three) == 3
    four = shown_with_files("trainer.critic_warmup=3", "actor_rollout_ref.rollout.n=-1")
    assert len(four) == 4 and set(three) < set(four)


def shown_with_files(*settings: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_and_validate(None, list(settings))
    return error.value.sentences


GSPO = f"{POLICY_LOSS}=gspo"
BOUNDS = [f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"]
WITHOUT_ACT = {  # a recipe, the overrides on the command line, and the first words of each sentence
    "bounds of GSPO": (
        "grpo_baseline",
        [GSPO, *BOUNDS],
        [f"{ACTOR}.clip_ratio_low is 0.0003", f"{ACTOR}.clip_ratio_high is 0.0004", f"{POLICY_LOSS} is gspo"],
    ),
    "a bound that is the default": (
        "grpo_baseline",
        [f"{ACTOR}.clip_ratio_high=0.28"],
        [f"{ACTOR}.clip_ratio_high is 0.28"],
    ),
    "a switch of the command line": (
        "dapo_7b",
        [f"{USE_DAPO}=false", f"{ACTOR}.clip_ratio_high=0.3"],
        [f"{ACTOR}.clip_ratio_high is 0.3"],
    ),
    "a section that is off": (
        "dapo_7b",
        [f"{OVERLONG}.enable=false", f"{OVERLONG}.penalty_factor=0.5"],
        [f"{OVERLONG}.penalty_factor is 0.5"],
    ),
    "no switch": ("dapo_7b", ["algorithm.gamma=0.9"], ["algorithm.gamma is 0.9"]),
    "what a recipe says, taken back": (
        "dapo_7b",
        [f"{LOSS_FUNCTION}=a.b:c", f"{USE_DAPO}=false", f"{ACTOR}.clip_ratio_c=3.0", f"{CORRECTION}.rollout_is=none"],
        [],
    ),
    "a value that is off": ("dapo_7b", [f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_coef=0.0"], []),
    "null is no value": ("grpo_baseline", [f"{ACTOR}.clip_ratio_high=null"], []),
    "a switch of the recipe": ("dapo_7b", [f"{USE_DAPO}=false", f"{OVERLONG}.enable=false"], []),
    "bounds that are read": ("grpo_baseline", [GSPO, f"{USE_DAPO}=true", *BOUNDS], []),
}


@pytest.mark.parametrize("name", WITHOUT_ACT)
def test_what_the_command_line_gives_acts_or_is_refused(name):
    recipe, given_keys, expected = WITHOUT_ACT[name]
    sentences = shown(given_keys, path_of(recipe))
    assert [sentence[: len(start)] for sentence, start in zip(sentences, expected, strict=True)] == expected
    assert all("has no effect while" in sentence or "set use_dapo to true" in sentence for sentence in sentences)


@settings(deadline=None, max_examples=40)
@given(row=st.sampled_from([row[0] for row in CONTRADICTIONS]), key=st.sampled_from(list(known_keys().values())))
@example("megatron.overlap_param_gather=true", known_keys()[f"{MEGATRON}.use_distributed_optimizer"])
@example("actor.clip_ratio_c=1.2", known_keys()[POLICY_LOSS])
@example("actor.clip_ratio=1.0", known_keys()[POLICY_LOSS])
@example("rollout.max_staleness=2", known_keys()[LOSS_FUNCTION])
@example("rollout.max_staleness=2", known_keys()["algorithm.rollout_correction.bypass_mode"])
@example("ref.path=other", known_keys()[LOSS_FUNCTION])
@example("sampling.enable=true data.gen_batch_size=51", known_keys()["algorithm.dynamic_sampling.filter_mode"])
@example("actor.max_tokens_per_microbatch=3071", known_keys()[f"{MEGATRON}.context_parallel_size"])
@example(PADDED, known_keys()[f"{MEGATRON}.sequence_parallel"])
@example(PADDED, known_keys()[f"{MEGATRON}.tensor_model_parallel_size"])
def test_a_refused_value_hides_the_mistakes_that_another_value_could_cure_and_no_other(row, key):
    hides_what_it_should(row, key)


@settings(deadline=None, max_examples=10)
@given(row=st.sampled_from([row[0] for row in CONTRADICTIONS]))
def test_a_refused_sft_enable_hides_the_mistakes_of_reinforcement_learning_alone(row):
    hides_what_it_should(row, known_keys()["sft.enable"])


def section_of(key: Key) -> str:
    return key.name.rpartition(".")[0]


def hides_what_it_should(row: str, key: Key) -> None:
    given_keys = [*SOUND, *overrides(row)]
    assume(not any(setting.startswith(f"{key.name}=") for setting in given_keys))
    assume(not key.is_mapping)  # its names are the reward's own
    steadfast = set(shown(given_keys))
    for value in other_values(key.name):
        steadfast &= set(shown([*given_keys, f"{key.name}={value}"]))
    first, *rest = shown([*given_keys, refused(key.name)])
    assert first.startswith(f"{key.name} is [[[1]]]")
    assert set(rest) <= steadfast
    # a finding about the key, or its section, may need another value of a second key as well
    own = rf"\b({key.name}|{section_of(key)})\b"
    if key.name == f"{MEGATRON}.sequence_parallel":
        own += "|padded for sequence"  # with TP 1 it changes nothing, but is read
    assert {text for text in steadfast if not re.search(own, text)} <= set(rest)
