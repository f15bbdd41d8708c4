"""Loading a config: a value means exactly its text, and every mistake is named with its cure."""

import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.aliases import ALIASES, FILTER_GROUPS
from megatron_dapo.config.key_reference import config_reference
from megatron_dapo.config.keys import known_keys, known_sections
from megatron_dapo.config.loader import MAX_UNKNOWN, load_config, nearest, to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.yaml_dialect import MAX_DEPTH, MAX_VALUES
from tests.proofs import amount

pytestmark = pytest.mark.unit

LR = "actor_rollout_ref.actor.optim.lr"
TYPO_LETTERS = "abcdefghijklmnopqrstuvwxyz_."
# a config is read in 5 to 30 ms
SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=amount(20, 50)
)


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def sentences(path: Path | None, overrides: list[str] = ()) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(path, list(overrides))
    return error.value.sentences


# ------------------------------------------------------------------------------------------ meaning


def test_no_file_and_no_override_gives_the_defaults():
    assert load_config(None, []) == Config()


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-06", "0.000001", "+1e-6", ".000001"])
def test_every_way_to_write_a_number_is_a_number(tmp_path, text):
    path = written(tmp_path, f"actor_rollout_ref: {{actor: {{optim: {{lr: {text}}}}}}}")
    assert load_config(path, []).actor_rollout_ref.actor.optim.lr == 1e-6
    assert load_config(None, [f"{LR}={text}"]).actor_rollout_ref.actor.optim.lr == 1e-6


@pytest.mark.parametrize("word", ["on", "off"])
def test_on_and_off_are_words_where_words_are_asked_for(word):
    key = "actor_rollout_ref.actor.megatron.use_transformer_engine"
    assert load_config(None, [f"{key}={word}"]).actor_rollout_ref.actor.megatron.use_transformer_engine == word


@pytest.mark.parametrize("name", ["123", "1e-6", "true", "null", "2026-01-01", "a: b", "a=b", "[x", "~/runs/x", ""])
def test_an_override_of_a_text_key_is_taken_as_it_stands(name):
    config = load_config(None, [f"data.prompt_key={name}", f"trainer.run_dir={name}"])
    assert config.data.prompt_key == name
    # this key takes null too
    assert config.trainer.run_dir == (None if name in ("null", "") else name)


def test_later_overrides_win_over_earlier_ones_and_over_the_file(tmp_path):
    path = written(tmp_path, "trainer: {seed: 2, nnodes: 3}")
    config = load_config(path, ["trainer.seed=4", "trainer.seed=5"])
    assert (config.trainer.seed, config.trainer.nnodes) == (5, 3)


def test_an_override_can_set_a_whole_section_and_single_reward_arguments():
    config = load_config(
        None, ["trainer={seed: 7, nnodes: 2}", "reward.kwargs.tolerance=1e-3", "reward.kwargs.unit=cm"]
    )
    assert (config.trainer.seed, config.trainer.nnodes) == (7, 2)
    assert config.reward.kwargs == {"tolerance": 1e-3, "unit": "cm"}


def test_an_empty_file_and_empty_sections_mean_the_defaults(tmp_path):
    assert load_config(written(tmp_path, ""), []) == Config()
    assert load_config(written(tmp_path, "data:\ntrainer:\n"), []) == Config()


# ----------------------------------------------------------------------------------------- mistakes


def test_the_nearest_key_is_named_for_a_short_name_and_for_the_right_name_in_the_wrong_place():
    expected = {
        "actor.clip_high": "actor_rollout_ref.actor.clip_ratio_high",
        "algorithm.clip_ratio_high": "actor_rollout_ref.actor.clip_ratio_high",
        "rollout.n": "actor_rollout_ref.rollout.n",
        "lr": LR,
        "actor_rollout_ref.actor.lr": LR,
        "algorithm.sampling.filter_mode": "algorithm.dynamic_sampling.filter_mode",
        "trainer.total_steps": "trainer.total_training_steps",
    }
    for unknown, known in expected.items():
        (sentence,) = sentences(None, [f"{unknown}=1"])
        assert f"Unknown key {unknown} = 1" in sentence and sentence.endswith(f"the nearest known key is {known}."), (
            sentence
        )


def test_a_name_like_no_key_gets_the_way_to_the_list():
    (sentence,) = sentences(None, ["zzzzqqqq=1"])
    assert "config-reference" in sentence


def test_an_unknown_section_is_one_mistake_that_names_the_nearest_section(tmp_path):
    (sentence,) = sentences(written(tmp_path, "algoritm: {dapo: {enable: true, more: 1}}"))
    assert "Unknown key algoritm" in sentence and sentence.endswith("the nearest known key is algorithm.")


def single_edits(name: str) -> set[str]:
    """Every text one insertion, deletion or substitution away."""
    cuts = [(name[:i], name[i:]) for i in range(len(name) + 1)]
    deleted = {head + tail[1:] for head, tail in cuts if tail}
    changed = {head + letter + tail[1:] for head, tail in cuts if tail for letter in TYPO_LETTERS}
    return deleted | changed | {head + letter + tail for head, tail in cuts for letter in TYPO_LETTERS}


@settings(deadline=None, max_examples=amount(20, 50))  # 15 ms each: a typo is compared with every key
@given(st.data())
def test_any_single_letter_typo_is_answered_with_the_key_that_was_meant(data):
    key = data.draw(st.sampled_from(list(known_keys())))
    typo = data.draw(st.sampled_from(sorted(single_edits(key) - set(known_keys()))))
    answer = nearest(typo, known_keys())
    assert answer == key or typo in single_edits(answer)  # a typo can be one letter from two keys


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("data.train_batch_size=0", "a whole number > 0"),
        ("data.train_batch_size=1.5", "a whole number > 0"),
        ("data.train_batch_size=true", "a whole number > 0"),
        ("data.gen_batch_size=-1", "a whole number > 0 and <= 1e+09, or null"),
        ("actor_rollout_ref.rollout.n=1000000000000", "a whole number > 0 and <= 10000"),
        ("weight_sync.timeout_s=1e-9", "a number >= 0.01 and <= 1e+08"),
        ("data.shuffle=yes", "true or false"),
        ("data.shuffle=1", "true or false"),
        ("data.train_files=a.jsonl", "a list of texts"),
        ("data.train_files=[1]", "a list of texts"),
        ("actor_rollout_ref.rollout.top_p=1.5", "a number > 0 and <= 1"),
        ("actor_rollout_ref.rollout.temperature=.nan", "a number > 0"),
        ("critic.value_loss_coef=0", "a number > 0"),  # a critic that learns nothing
        (f"{LR}=1e999", "a number > 0"),
        (f"{LR}=fast", "a number > 0"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "a list of 2 numbers >= 0 and < 1"),
        ("actor_rollout_ref.actor.optim.betas=[0.9, 1.0]", "a list of 2 numbers >= 0 and < 1"),
        ("algorithm.dynamic_sampling.filter_mode=hard", "one of strict, remove_all_correct, "),
        ("trainer.logger=[console, paper]", "a list of any of console, jsonl, tensorboard"),
        ("reward.kwargs=[1]", "a mapping of names to "),
    ],
)
def test_a_wrong_value_is_one_sentence_with_key_value_place_and_what_is_allowed(override, allowed):
    (sentence,) = sentences(None, [override])
    key = override.partition("=")[0]
    assert sentence.startswith(f"{key} is ") and "(override)" in sentence and f"must be {allowed}" in sentence
    assert "pydantic" not in sentence and "Input should" not in sentence


SEEDS = {"data.seed", "trainer.seed"}
COUNTS = [key for key in known_keys().values() if "a whole number" in key.allowed and key.name not in SEEDS]


def test_a_seed_may_be_large():
    config = load_config(None, [f"{name}={10**12}" for name in SEEDS])
    assert config.data.seed == config.trainer.seed == 10**12


@pytest.mark.parametrize("key", COUNTS, ids=lambda k: k.name)
def test_a_count_that_cannot_be_meant_is_refused(key):
    (sentence,) = sentences(None, [f"{key.name}={10**12}"])
    assert sentence.startswith(f"{key.name} is ") and key.allowed in sentence


@pytest.mark.parametrize("key", [key for key in known_keys().values() if key.name.endswith("_s")], ids=lambda k: k.name)
@pytest.mark.parametrize("value", ["0", "1e-9", "1e10"])
def test_a_deadline_that_cannot_be_meant_is_refused(key, value):
    (sentence,) = sentences(None, [f"{key.name}={value}"])
    assert sentence.startswith(f"{key.name} is ") and ">= 0.01" in sentence


def test_all_mistakes_of_file_and_overrides_are_reported_together(tmp_path):
    path = written(tmp_path, "data: {train_batch_size: 0, foo: 1}\ntrainer: 3\n")
    mistakes = sentences(path, ["actor.clip_high=0.3", "trainer.seed", f"{LR}=-1"])
    assert len(mistakes) == 6
    assert sum(str(path) in sentence for sentence in mistakes) == 3


def test_a_key_given_twice_is_a_mistake(tmp_path):
    (sentence,) = sentences(written(tmp_path, "trainer:\n  seed: 1\n  nnodes: 1\n  seed: 2\n"))
    assert "seed" in sentence and "lines 2 and 4" in sentence
    (sentence,) = sentences(written(tmp_path, "trainer: {seed: 1}\ntrainer.seed: 2\n"))
    assert "trainer.seed is given twice" in sentence


@pytest.mark.parametrize(
    "content",
    [b"[1, 2]", b"just words", b"a: [", b"\xff\xfe\x00", b"a: &x 1\nb: *x", b"a: !!python/object:os.system {}",
     b"? [a]\n: 1", b"- " * 5000, b"a: 1\n---\nb: 2"],
)  # fmt: skip
def test_a_file_that_is_no_config_is_named_in_one_sentence(tmp_path, content):
    path = written(tmp_path, content)
    (sentence,) = sentences(path)
    assert str(path) in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "x" * 10**6, "above 1 MB"),
        ("".join(f"key{i}: 1\n" for i in range(MAX_VALUES)), f"more than {MAX_VALUES} keys and values"),
        (f"data: {{train_files: [{'a,' * MAX_VALUES}]}}", f"more than {MAX_VALUES} keys and values"),
        ("[" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        ("a: {" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)), "aliases"),
        ("a: &a [*a]", "aliases"),
    ],
    ids=["long", "keys", "list", "lists", "mappings", "aliases", "recursion"],
)
def test_a_file_that_no_config_is_as_large_as_is_named_in_one_sentence(tmp_path, text, words):
    (sentence,) = sentences(written(tmp_path, text))
    assert words in sentence and len(sentence) < 500


def test_a_file_without_end_is_not_read_to_its_end():
    (sentence,) = sentences(Path("/dev/zero"))
    assert "/dev/zero" in sentence and "above 1 MB" in sentence


def test_of_many_unknown_keys_the_first_are_named_and_the_others_counted(tmp_path):
    *first, last = sentences(written(tmp_path, "".join(f"key{i}: 1\n" for i in range(MAX_UNKNOWN + 300))))
    assert len(first) == MAX_UNKNOWN and all(f"Unknown key key{i} = 1" in text for i, text in enumerate(first))
    assert "300" in last and f"key{MAX_UNKNOWN}" in last


def test_what_a_file_that_cannot_be_read_would_have_said_is_not_guessed(tmp_path):
    with pytest.raises(UserError) as error:
        load_and_validate(written(tmp_path, "a: ["), [])
    assert len(error.value.sentences) == 1


def test_a_missing_file_is_named(tmp_path):
    (sentence,) = sentences(tmp_path / "nowhere.yaml")
    assert "nowhere.yaml" in sentence and "No such file" in sentence


def test_a_user_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(UserError(["one.", "two."])))
    assert error.sentences == ["one.", "two."] and error.report() == "2 mistakes to correct:\none.\ntwo."
    assert UserError("only.").report() == "1 mistake to correct:\nonly."


# ------------------------------------------------------------------------------------------ extends


def extending(folder: Path, base: str, text: str) -> Path:
    """Write base.yaml, and recipes/recipe.yaml that extends it by a relative path."""
    (folder / "recipes").mkdir()
    (folder / "base.yaml").write_text(base, encoding="utf-8")
    path = folder / "recipes" / "recipe.yaml"
    path.write_text(f"extends: ../base.yaml\n{text}", encoding="utf-8")
    return path


def test_a_file_that_extends_another_has_its_keys_and_wins_over_them(tmp_path):
    base = "trainer: {seed: 2, nnodes: 3}\nactor: {clip_ratio: 0.1}\nreward.kwargs: {a: 1, b: 2}"
    path = extending(
        tmp_path, base, "trainer.seed: 4\nactor_rollout_ref: {actor: {clip_ratio: 0.3}}\nreward.kwargs: {b: 3}"
    )
    config = load_config(path, ["trainer.nnodes=5"])
    assert (config.trainer.seed, config.trainer.nnodes) == (4, 5)
    assert config.actor_rollout_ref.actor.clip_ratio == 0.3 and config.reward.kwargs == {"b": 3}
    assert "extends" not in to_yaml(config) and load_config(written(tmp_path, to_yaml(config))) == config


def test_a_mistake_in_an_extended_file_is_named_with_that_file(tmp_path):
    path = extending(tmp_path, "trainer: {seed: x, nnodes: -1}\nfoo: 1", "trainer: {seed: 1}")
    unknown, nodes = sentences(path)
    assert "base.yaml" in unknown and "Unknown key foo" in unknown
    assert nodes.startswith("trainer.nnodes is -1") and "base.yaml" in nodes


@pytest.mark.parametrize(
    ("base", "text", "words"),
    [
        (None, "extends: nowhere.yaml", ["extends is nowhere.yaml", "No such file", "give the path of a YAML file"]),
        ("a: [", "extends: base.yaml", ["extends is base.yaml", "base.yaml is not a config in YAML"]),
        ("extends: other.yaml", "extends: base.yaml", ["extends is base.yaml", "extend other.yaml itself"]),
        ("extends: base.yaml", "extends: base.yaml", ["extends is base.yaml", "extends a file, too"]),
        (None, "extends: config.yaml", ["extends is config.yaml", "extends a file, too"]),
        (None, "extends: 3", ["extends is 3", "must be the path of a YAML file, relative to this one"]),
        (None, "extends: null", ["extends is null", "must be the path of a YAML file, relative to this one"]),
        (None, "data: {extends: base.yaml}", ["Unknown key data.extends"]),
    ],
)
def test_a_file_that_cannot_be_extended_is_one_sentence(tmp_path, base, text, words):
    if base is not None:
        (tmp_path / "base.yaml").write_text(base, encoding="utf-8")
    path = written(tmp_path, f"{text}\ntrainer.nnodes: 2")
    with pytest.raises(UserError) as error:
        load_and_validate(path, [], check_files=False)
    (sentence,) = error.value.sentences
    assert all(word in sentence for word in [*words, str(path)])


# --------------------------------------------------------------------------------------- properties

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
NAMES = st.sampled_from([part for name in [*known_keys(), *known_sections()] for part in name.split(".")]) | st.text(
    max_size=8
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


def loads_or_tells(path: Path | None, overrides: list[str]) -> None:
    try:
        assert isinstance(load_config(path, overrides), Config)
    except UserError as error:
        assert error.sentences and all("\n" not in sentence for sentence in error.sentences)


@SAME_FOLDER
@given(text=st.text(max_size=60) | st.text(alphabet="abn:-{}[],&*!|>?#'\"\n 0.", max_size=60))
def test_any_text_loads_or_is_a_user_error(tmp_path, text):
    loads_or_tells(written(tmp_path, text.encode("utf-8", errors="surrogatepass")), [])
    loads_or_tells(None, [text, f"data.seed={text}", f"data.train_files={text}", f"trainer.run_dir={text}"])


@SAME_FOLDER
@given(tree=TREES)
def test_any_tree_loads_or_is_a_user_error(tmp_path, tree):
    loads_or_tells(written(tmp_path, yaml.safe_dump(tree, allow_unicode=True)), [])


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["1e-6", "on", "null", "010", "1:30", "2026-01-01", "a: b", "- x", "#", "é\u2028"]
)
POSITIVE = st.integers(1, 10**9)
FLOATS = st.floats(min_value=1e-300, max_value=1e300)


@SAME_FOLDER
@given(
    files=st.lists(TEXTS, max_size=3),
    name=TEXTS,
    run_dir=st.none() | TEXTS,
    size=POSITIVE,
    gen_size=st.none() | POSITIVE,
    seed=st.integers(),
    lr=FLOATS,
    beta=st.floats(0.0, 1.0, exclude_max=True),
    kwargs=st.dictionaries(TEXTS, TEXTS | st.integers() | st.booleans() | FLOATS, max_size=3),
)
def test_what_is_written_loads_to_an_equal_config(
    tmp_path, files, name, run_dir, size, gen_size, seed, lr, beta, kwargs
):
    config = Config.model_validate(
        {
            "data": {"train_files": files, "train_batch_size": size, "gen_batch_size": gen_size, "seed": seed},
            "actor_rollout_ref": {"actor": {"optim": {"lr": lr, "betas": [beta, beta]}}},
            "reward": {"kwargs": kwargs},
            "trainer": {"experiment_name": name, "run_dir": run_dir},
        }
    )
    assert load_config(written(tmp_path, to_yaml(config)), []) == config


def test_what_is_written_means_the_same_to_any_yaml_reader():
    config = load_config(None, ["actor_rollout_ref.actor.megatron.use_transformer_engine=on", f"{LR}=1e-6"])
    assert Config.model_validate(yaml.safe_load(to_yaml(config))) == config


# ---------------------------------------------------------------------------------- other spellings


def test_a_section_or_a_key_may_be_given_under_its_other_spelling(tmp_path):
    path = written(tmp_path, "actor: {use_dapo: true, optim: {lr: 1e-5}}\ncritic: {vf_coef: 0.25}")
    config = load_config(path, ["actor.clip_ratio_low=0.1", "critic.vf_coef=0.75"])
    actor = config.actor_rollout_ref.actor
    assert (actor.use_dapo, actor.optim.lr, actor.clip_ratio_low) == (True, 1e-5, 0.1)
    assert config.critic.value_loss_coef == 0.75


def test_an_override_wins_over_the_file_whatever_either_calls_the_key(tmp_path):
    path = written(tmp_path, "actor: {clip_ratio: 0.1}\ncritic: {value_loss_coef: 0.25}")
    config = load_config(path, ["actor_rollout_ref.actor.clip_ratio=0.3", "critic.vf_coef=0.5"])
    assert (config.actor_rollout_ref.actor.clip_ratio, config.critic.value_loss_coef) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("critic: {vf_coef: 0.5, value_loss_coef: 0.5}", "critic.vf_coef", "critic.value_loss_coef"),
        (
            "actor_rollout_ref: {actor: {clip_ratio: 0.1}}\nactor: {clip_ratio: 0.1}",
            "actor_rollout_ref.actor.clip_ratio",
            "actor.clip_ratio",
        ),
    ],
)
def test_one_key_in_both_spellings_is_a_mistake_that_names_both(tmp_path, text, first, second):
    (sentence,) = sentences(written(tmp_path, text))
    assert f"as {first} and as {second}; keep one." in sentence


def test_a_mistake_under_another_spelling_is_named_as_it_was_written(tmp_path):
    path = written(tmp_path, "actor: {shuffle: 3, clip_high: 0.3, optim: 1}")
    assert [sentence.split(" is ")[0].split(" = ")[0] for sentence in sentences(path)] == [
        "Unknown key actor.clip_high",
        "actor.optim",
        "actor.shuffle",
    ]


def test_the_reference_lists_every_other_spelling():
    for alias, meant in (ALIASES | FILTER_GROUPS).items():
        assert f"| `{alias}` | `{meant}` |" in config_reference()
        assert meant in known_keys() or meant in known_sections()
