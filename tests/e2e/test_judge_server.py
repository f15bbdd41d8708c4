"""A real SGLang server as the judge, by its OpenAI-compatible endpoint."""

import asyncio
import json
import re
import urllib.request

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.build_rollout import make_scorers

pytestmark = pytest.mark.e2e

PATTERN = r"([0-9])"  # the last digit in the tiny model's answer
RESPONSES = [f"{number}+{number}" for number in range(8)]


def completion(url: str, key: str, question: str) -> str:
    """The server's answer, asked without the client that the judge uses."""
    body = {"model": "default", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def test_the_scores_are_the_servers(server, tmp_path):
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(server.key)
    config = load_config(
        None,
        [
            "reward.function=math_verify",
            f"reward.judge.url={server.url}/v1",
            f"reward.judge.api_key_file={key_file}",
            "reward.judge.prompt=is {response} good",
            f"reward.judge.pattern={PATTERN}",
            "reward.judge.weight=1.0",
            "reward.judge.max_tokens=32",
        ],
    )
    prompt = Prompt(0, "key", (1,), "", "any", "46", messages="12+34=")

    async def judged() -> list[RewardResult]:
        scorers = make_scorers(config)
        await scorers.start(60.0)
        try:
            asking = (scorers.combined(RewardResult(0.0, False), prompt, response) for response in RESPONSES)
            return await asyncio.gather(*asking)
        finally:
            await scorers.close()

    results = asyncio.run(judged())
    written = [completion(server.url, server.key, f"is {response} good") for response in RESPONSES]
    digits = [re.findall(PATTERN, text) for text in written]
    assert sum(bool(one) for one in digits) >= 4, written
    for result, one in zip(results, digits, strict=True):
        assert (result.error is None) == bool(one)
        assert not one or result.score == float(one[-1])
