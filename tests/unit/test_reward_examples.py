"""The examples of a reward model and of a judge, without the runs that use them."""

import asyncio

import pytest
from aiohttp import web

from examples.judge import demo as judge_demo
from examples.judge.endpoint import KEY, application, judgement
from examples.reward_model import brevity, demo
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Prompt
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.build_rollout import make_scorers
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("response", "score"), [("83", 1.0), ("38+45=83", 1.0), ("82", 0.5), ("8", 0.0), ("", 0.0), ("183", 0.0)]
)
def test_the_judge_of_the_example_counts_right_digits_through_its_endpoint(response, score, monkeypatch):
    monkeypatch.setenv(KEY, "a-word")

    async def judged() -> RewardResult:
        runner = web.AppRunner(application())
        await runner.setup()
        port = judge_demo.free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        scorers = make_scorers(load_config(None, ["reward.function=none", *judge_demo.overrides(port)]))
        await scorers.start(60.0)
        try:
            prompt = Prompt(0, "key", (1,), "", "any", "83", messages="38+45=")
            return await scorers.combined(RewardResult(0.0, False), prompt, response)
        finally:
            await scorers.close()
            await runner.cleanup()

    result = asyncio.run(judged())
    assert result.error is None and result.score == pytest.approx(0.5 * score)


def test_the_judge_reports_answers_it_cannot_read():
    assert "Score" not in judgement("how are you?")


def test_the_examples_configs_are_right(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "make", lambda folder: brevity.make(folder, steps=2))
    monkeypatch.setenv(KEY, "a-word")
    recipe = str(REPOSITORY / "configs" / "demo.yaml")
    for overrides in (demo.overrides(), judge_demo.overrides(1)):
        load_and_validate(recipe, overrides, check_files=False)
    folder = tmp_path / "brevity"
    assert architecture_of(str(folder)) == "Qwen2ForSequenceClassification"
    tokens = load_tokenizer(folder).encode_answered("38+45=", "83")
    assert len(tokens) == len("38+45=83"), "it scores the text as the policy writes it"
    assert (brevity.target(""), brevity.target("x" * brevity.LONGEST)) == (1.0, 0.0)
