"""Other documents' names for keys: they load, mean the same, and mistakes speak of them."""

import pytest

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config, to_yaml
from megatron_dapo.queue.group_filter import make_queue

pytestmark = pytest.mark.unit

DAPO, GROUPS, SECTION = "algorithm.dapo", "algorithm.filter_groups", "algorithm.dynamic_sampling"
DYNAMIC, OVERLONG = f"{DAPO}.dynamic_sampling", f"{DAPO}.overlong_reward_shaping"


@pytest.fixture
def load(tmp_path):
    """A function of a file's text and overrides that returns the config
    after all checks that need no files."""

    def load_text(text: str, *overrides: str):
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        return load_and_validate(tmp_path / "config.yaml", list(overrides), check_files=False)

    return load_text


@pytest.fixture
def sentences(load):
    def sentences_of(text: str, *overrides: str) -> list[str]:
        with pytest.raises(UserError) as error:
            load(text, *overrides)
        return error.value.sentences

    return sentences_of


MEANINGS = {  # documents' words -> the same in names of the schema
    f"{DAPO}: {{enable: true, dynamic_sampling: {{enable: true}}}}": f"{SECTION}.enable: true",
    f"{DAPO}: {{enable: false, dynamic_sampling: {{enable: true}}}}": f"{SECTION}.enable: false",
    f"{DAPO}.enable: false": "",
    f"{DAPO}: {{enable: true, overlong_reward_shaping: {{enable: true, overlong_buffer_len: 9}}}}": (
        "algorithm.overlong_reward_shaping: {enable: true, buffer_len: 9}"
    ),
    f"{GROUPS}.enable: true": f"{SECTION}: {{enable: true, filter_mode: acc, on_exhausted: train_partial}}",
    f"{GROUPS}: {{enable: true, metric: score, max_num_gen_batches: 0, on_exhausted: raise}}": (
        f"{SECTION}: {{enable: true, filter_mode: score, max_num_gen_batches: 0, on_exhausted: raise}}"
    ),
    f"{GROUPS}.enable: false": "",
    f"{GROUPS}.enable: false\n{SECTION}.enable: true": f"{SECTION}.enable: true",
    f"{GROUPS}.enable: true\n{SECTION}: {{enable: false, filter_mode: none}}": (
        f"{SECTION}: {{enable: true, filter_mode: acc, on_exhausted: train_partial}}"
    ),
    f"{DAPO}.enable: false\n{DYNAMIC}.enable: true\n{GROUPS}.enable: true": (
        f"{SECTION}: {{enable: true, filter_mode: acc, on_exhausted: train_partial}}"
    ),
}


@pytest.mark.parametrize("text", MEANINGS)
def test_a_name_of_a_document_means_what_the_document_says_and_is_seen_by_nobody_else(load, text):
    config = load(text)
    assert config == load(MEANINGS[text])
    assert "\n  dapo:" not in to_yaml(config) and "filter_groups" not in to_yaml(config)


def test_the_main_switch_of_the_command_line_switches_a_recipe_off_and_back_on(load):
    recipe = f"{SECTION}.enable: true\nalgorithm.overlong_reward_shaping.enable: true"
    off = load(recipe, f"{DAPO}.enable=false").algorithm
    assert not off.dynamic_sampling.enable and not off.overlong_reward_shaping.enable
    on = load(recipe, f"{DAPO}.enable=false", f"{DAPO}.enable=true").algorithm
    assert on.dynamic_sampling.enable and on.overlong_reward_shaping.enable


ON = f"{SECTION}.enable: true"
LATER = {  # a file, and overrides -> the file in names of the schema
    (f"{GROUPS}.enable: true", f"{SECTION}.enable=false"): f"{SECTION}.enable: false",
    (f"{SECTION}: {{enable: true, filter_mode: acc}}", f"{GROUPS}.enable=false"): (
        f"{SECTION}: {{enable: false, filter_mode: acc}}"
    ),
    (f"{GROUPS}.enable: false", f"{SECTION}.enable=true"): ON,
    (f"{DAPO}.enable: false", f"{SECTION}.enable=true"): ON,
    (f"{DAPO}: {{enable: false, dynamic_sampling: {{enable: true}}}}", f"{SECTION}.enable=true"): ON,
    (ON, f"{DYNAMIC}.enable=true"): ON,
    (ON, f"{OVERLONG}.enable=true", f"{OVERLONG}.buffer_len=9"): (
        f"{ON}\nalgorithm.overlong_reward_shaping: {{enable: true, buffer_len: 9}}"
    ),
    (f"{GROUPS}: {{metric: acc, on_exhausted: train_partial}}",): "",
}


@pytest.mark.parametrize("case", LATER)
def test_of_two_names_the_later_one_counts(load, case):
    assert load(*case).algorithm == load(LATER[case]).algorithm


IN_VAIN = {  # a file, and overrides -> words of the one sentence
    (ON + f"\n{GROUPS}.enable: false", f"{GROUPS}.metric=score"): [
        f"{GROUPS}.metric is 'score' (override), but has no effect",
        f"give {SECTION}.filter_mode",
    ],
    (f"{DAPO}.enable: false", f"{DYNAMIC}.enable=true"): [f"{DYNAMIC}.enable is true (override), but has no effect"],
    (f"{GROUPS}: {{enable: true, metric: none}}",): [f"{GROUPS}.metric is 'none'", "must name a metric"],
    ("", "dapo.enable=true"): ["Unknown key dapo.enable", f"the nearest known key is {DAPO}.enable"],
    ("", f"{GROUPS}.enabel=true"): ["Unknown key", f"the nearest known key is {GROUPS}.enable"],
}


@pytest.mark.parametrize("case", IN_VAIN)
def test_a_name_without_an_effect_is_refused(sentences, case):
    (sentence,) = sentences(*case)
    assert [word for word in IN_VAIN[case] if word not in sentence] == []


MISTAKES = {  # a file -> words of its one sentence
    f"{DYNAMIC}.enable: true": [f"{DYNAMIC}.enable is true", f"{DAPO}.enable is false; set {DAPO}.enable to true"],
    f"{OVERLONG}.enable: true": [f"{OVERLONG}.enable is true", f"{DAPO}.enable is false"],
    f"{DAPO}.enable: true": [f"{DAPO}.enable is true", "does nothing by itself"],
    f"{DAPO}: {{enable: true, dynamic_sampling: {{enable: false}}}}": ["does nothing by itself"],
    f"{DAPO}: {{enable: 1, dynamic_sampling: {{enable: true}}}}": [f"{DAPO}.enable is 1", "must be true or false"],
    f"{DAPO}: 3": [f"{DAPO} is 3", "keys of dynamic_sampling, overlong_reward_shaping, enable"],
    f"{GROUPS}: on": [f"{GROUPS} is 'on'", "keys of enable, metric, max_num_gen_batches, on_exhausted"],
    f"{DAPO}.form: mask": [f"Unknown key {DAPO}.form", f"{SECTION}.form"],
    f"{GROUPS}: {{enable: true, metric: size}}": [f"{GROUPS}.metric is 'size'", "strict"],
    f"{GROUPS}.metric: score": [f"{GROUPS}.metric is score", f"{GROUPS}.enable is false"],
    f"{GROUPS}.enable: true\ndata.gen_batch_size: 51": [f"51 x {GROUPS}.max_num_gen_batches 10"],
    f"{GROUPS}.enable: true\nactor_rollout_ref.rollout.n: 1": [f"{GROUPS}.enable is true, which compares"],
    f"{GROUPS}.enable: true\n{SECTION}.form: mask": [f"{GROUPS}.enable (", f"{SECTION}.form (", "under one of them"],
    f"{GROUPS}: {{enable: true, metric: acc}}\n{DAPO}: {{enable: true, dynamic_sampling: {{enable: true}}}}": [
        f"{GROUPS}.enable (",
        f"{DYNAMIC}.enable (",
        "two names of one section",
    ],
    f"{SECTION}.enable: true\n{DAPO}: {{enable: true, dynamic_sampling.enable: true}}": [
        f"as {SECTION}.enable and as {DYNAMIC}.enable; keep one"
    ],
    "actor: {clip_ratio: 1.5}": ["actor.clip_ratio is 1.5, but must be below 1"],
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_sentence_in_the_names_that_were_written(sentences, text):
    (sentence,) = sentences(text)
    assert [word for word in MISTAKES[text] if word not in sentence] == []


def test_a_switch_of_the_command_line_is_named_with_the_key_that_it_makes_useless(sentences):
    recipe = f"{DAPO}: {{enable: true, dynamic_sampling: {{enable: true}}}}"
    (sentence,) = sentences(recipe, f"{DAPO}.enable=false", f"{DYNAMIC}.filter_mode=none")
    assert sentence.startswith(f"{DYNAMIC}.filter_mode is none, but has no effect while {DAPO}.enable is false")


def test_a_metric_may_be_masked_too():
    queue = make_queue(load_config(None, [f"{SECTION}={{enable: true, filter_mode: acc, form: mask}}"]))
    assert queue.limits.masks
