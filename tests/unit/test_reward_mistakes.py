"""Mistakes about rewards, judges and prompts: one sentence each, with key and cure; exit code 2."""

import json
from pathlib import Path

import pytest

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.reward_registry import check_signature

pytestmark = pytest.mark.unit

JUDGE = "reward.judge.url=http://a:1/v1"
MODEL = "reward.model.path={model}"
URL = "reward.model.url=http://host:1"
FILES = "data.train_files=[{prompts}]"
# (settings, the key that a sentence names, its words about it)
MISTAKES = [
    (["reward.function=math_verfy"], "reward.function", "the nearest is math_verify"),
    (["reward.function=score"], "reward.function", "package.module:function"),
    (["reward.function=no_such_module:score"], "reward.function", "no_such_module"),
    (["reward.function=json:no_such_function"], "reward.function", "no_such_function"),
    (["reward.function=none"], "reward.function", "give one"),
    (["reward.kwargs.time_limit_s=1.0"], "reward.kwargs", "by_data_source"),
    (["reward.timeout_s=0.0"], "reward.timeout_s", "0"),
    (["reward.timeout_s=soon"], "reward.timeout_s", "soon"),
    (["reward.num_workers=0"], "reward.num_workers", "0"),
    (["reward.max_concurrency=0"], "reward.max_concurrency", "0"),
    (["reward.batch_size=-1"], "reward.batch_size", "-1"),
    (["reward.memory_limit_mb=0"], "reward.memory_limit_mb", "0"),
    (["reward.max_error_share=1.5"], "reward.max_error_share", "1.5"),
    (["reward.pass_env=[A=B]"], "reward.pass_env[0]", "the value stays in the environment"),
    (["reward.function=math_verify", "reward.allow_unsandboxed=true"], "reward.allow_unsandboxed", "code_tests"),
    (["reward.combine=model"], "reward.combine", "reward.model.path"),
    ([MODEL, "reward.combine=product"], "reward.combine", "product"),
    (["reward.functions=math_verify"], "reward.functions", "reward.function"),
    (["reward.model.path=/no/such/folder"], "reward.model.path", "/no/such/folder"),
    (["reward.model.path={language_model}"], "reward.model.path", "Qwen2ForCausalLM"),
    (["reward.model.path={two_labels}"], "reward.model.path", "2 labels"),
    (["reward.model.path={no_tokenizer}"], "reward.model.path", "no tokenizer.json"),
    (["reward.model.path={damaged}"], "reward.model.path", "config.json"),
    ([MODEL, "reward.model.url=localhost"], "reward.model.url", "http://host:port"),
    ([MODEL, "reward.model.url=http://user:word@host:1"], "reward.model.url", "http://host:port"),
    (["reward.model.url=http://host:1"], "reward.model.url", "reward.model.path"),
    ([MODEL, "reward.model.api_key_file=key"], "reward.model.api_key_file", "reward.model.url"),
    ([MODEL, URL, "reward.model.api_key_file={prompts}x"], "reward.model.api_key_file", "read"),
    ([MODEL, URL, "reward.model.api_key_file={open}"], "reward.model.api_key_file", "chmod"),
    ([MODEL, "reward.model.tensor_model_parallel_size=0"], "reward.model.tensor_model_parallel_size", "0"),
    ([MODEL, "reward.model.weight=0.0"], "reward.model.weight", "count for nothing"),
    ([MODEL, "reward.model.weight=nan"], "reward.model.weight", "must be a number"),
    ([MODEL, "actor_rollout_ref.rollout.multi_turn.enable=true"], "reward.model.path", "leave one of the two out"),
    ([JUDGE, "actor_rollout_ref.rollout.multi_turn.enable=true"], "reward.judge.url", "leave one of the two out"),
    (["reward.judge.url=judge:1"], "reward.judge.url", "http://host:port/v1"),
    (["reward.judge.url=http://user:word@a/v1"], "reward.judge.url", "api_key_env"),
    (["reward.judge.url=http://a/v1?api-key=x"], "reward.judge.url", "question mark"),
    (["reward.judge.url=http://a:port/v1"], "reward.judge.url", "http://host:port/v1"),
    ([JUDGE, "reward.judge.prompt=good?"], "reward.judge.prompt", "{{response}}"),
    ([JUDGE, "reward.judge.prompt={{response}} {{ground_trut}}"], "reward.judge.prompt", "{{ground_truth}}"),
    ([JUDGE, "reward.judge.pattern=("], "reward.judge.pattern", "regular expression"),
    ([JUDGE, "reward.judge.pattern=Score"], "reward.judge.pattern", "no group"),
    ([JUDGE, "reward.judge.api_key_env=sk-1"], "reward.judge.api_key_env", "name of an environment variable"),
    ([JUDGE, "reward.judge.api_key_env=A_KEY", "reward.judge.api_key_file=b"], "reward.judge.api_key_env", "both"),
    (["reward.judge.model=gpt"], "reward.judge.model", "reward.judge.url"),
    ([JUDGE, "reward.judge.timeout_s=0.0"], "reward.judge.timeout_s", "0"),
    ([JUDGE, "reward.judge.max_retries=-1"], "reward.judge.max_retries", "-1"),
    ([JUDGE, "reward.judge.max_concurrency=0"], "reward.judge.max_concurrency", "0"),
    ([JUDGE, "reward.judge.max_requests=0"], "reward.judge.max_requests", "0"),
    ([JUDGE, "reward.judge.max_tokens=0"], "reward.judge.max_tokens", "0"),
    ([JUDGE, "reward.judge.temperature=-0.5"], "reward.judge.temperature", "-0.5"),
    ([JUDGE, "reward.judge.weight=0.0"], "reward.judge.weight", "count for nothing"),
    ([FILES, "data.mixture=[1, 2]"], "data.mixture", "one weight per file"),
    ([FILES, "data.mixture=[0]"], "data.mixture", "0"),
    ([FILES, "data.mixture=[-1]"], "data.mixture", "-1"),
    ([FILES, "data.mixture=[inf]"], "data.mixture", "numbers > 0"),
    ([FILES, "data.mixture=[1]", "exp_manager.experience_replay.enable=true"], "data.mixture", "leave one of the two"),
    (["data.pass_rate=[0.9, 0.1]"], "data.pass_rate", "[lowest, highest]"),
    (["data.pass_rate=[0.9]"], "data.pass_rate", "[lowest, highest]"),
    (["data.pass_rate=[5, 95]"], "data.pass_rate", "95"),
    (["data.pass_rate_key=rate"], "data.pass_rate_key", "data.pass_rate"),
    (["data.curriculum=hard"], "data.curriculum", "hard"),
    (["data.difficulty_key=level"], "data.difficulty_key", "data.curriculum"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    places = {}
    one = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    kinds = {
        "model": one,
        "language_model": {"architectures": ["Qwen2ForCausalLM"]},
        "two_labels": one | {"num_labels": 2},
        "no_tokenizer": one,
        "damaged": one,
    }
    for name, config in kinds.items():
        places[name] = folder / name
        places[name].mkdir()
        (places[name] / "config.json").write_text(json.dumps(config))
        if name != "no_tokenizer":
            (places[name] / "tokenizer.json").write_text("{}")
    (places["damaged"] / "config.json").write_text("{")
    places["prompts"] = folder / "prompts.jsonl"
    places["prompts"].write_text('{"prompt": "1+1=", "label": "2"}\n')
    places["open"] = folder / "open"
    places["open"].write_text("key")
    places["open"].chmod(0o644)
    return places


@pytest.mark.parametrize(("settings", "key", "words"), MISTAKES, ids=[row[0][-1] for row in MISTAKES])
def test_a_mistake_is_one_sentence_with_key_and_cure(settings, key, words, places):
    with pytest.raises(UserError) as error:
        load_and_validate(None, [setting.format(**places) for setting in settings])
    about = [
        sentence for sentence in error.value.sentences if key in sentence.split(" ", 1)[0] or f"{key} " in sentence
    ]
    assert len(about) == 1, error.value.sentences
    [sentence] = about
    assert words.format() in sentence and sentence.endswith(".") and "\n" not in sentence


@pytest.mark.parametrize(
    ("function", "kwargs", "words"),
    [
        ("math_verify", {"time_limit_s": "soon"}, "is 'soon', but .*math_verify takes a number above 0"),
        ("math_verify", {"time_limit_s": 0}, "is 0, but"),
        ("math_verify", {"time_limit_s": True}, "is True, but"),
        ("code_tests", {"memory_limit_mb": 0.5}, "is 0.5, but .*a number above 0"),
        ("code_tests", {"partial_credit": "yes"}, "is 'yes', but .*true or false"),
        ("exact_match", {"marker": 1}, "is 1, but .*takes text"),
        ("math_dapo", {"boxed": True}, "cannot be called as"),
    ],
)
def test_a_value_that_a_built_in_function_cannot_take_is_refused_when_workers_start(function, kwargs, words):
    with pytest.raises(UserError, match=f"reward.kwargs.*{words}"):
        check_signature(function, kwargs)


def test_a_function_with_too_few_parameters_is_a_mistake_of_its_own_key():
    with pytest.raises(
        UserError, match=r"^.*reward\.function: tests\.loss_functions:dapo cannot be called .* correct it"
    ):
        check_signature("tests.loss_functions:dapo", {})


def test_values_that_built_in_functions_take():
    for function, kwargs in (
        ("math_verify", {"time_limit_s": 3}),
        ("exact_match", {"marker": "####", "strip": False}),
        ("code_tests", {"time_limit_s": 0.5, "memory_limit_mb": 256}),
    ):
        check_signature(function, kwargs)
