"""Agents of each kind call a model through real gateways."""

import asyncio
import sys

import pytest

from megatron_dapo.agents import command_process
from megatron_dapo.agents.interface import Outcome
from megatron_dapo.common.errors import UserError
from tests.agent_gateway import LIMITS, ScriptedModel, bench
from tests.agent_pools import running_pool, task

pytestmark = pytest.mark.unit

COMMAND = """
import json, os, sys, urllib.request
url, model, result_file = sys.argv[1:]
body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
# the key is in the URL, or in a header
texts = []
for root, key in ((os.environ["OPENAI_BASE_URL"], "EMPTY"), (url, os.environ["OPENAI_API_KEY"])):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    request = urllib.request.Request(root + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        texts.append(json.load(answer)["choices"][0]["message"]["content"])
with open(result_file, "w") as file:
    json.dump({"answer": " ".join(texts)}, file)
"""
FUNCTION = """
import openai
from megatron_dapo.agents.interface import Outcome

async def rollout(task, model):
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.key)
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model=model.name, messages=messages)
    tokens = (await model.generate([1, 2, 3], 10)).tokens
    return Outcome(1.0, error=f"{answer.choices[0].message.content} {len(tokens)}")
"""


@pytest.mark.parametrize("kind", ["command", "sandbox", "function"])
def test_an_agent_of_each_kind_reaches_its_model(kind, tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(COMMAND)
    (tmp_path / "own_agent.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [sys.executable, str(tmp_path / "agent.py"), "{base_url}", "{model}", "{result_file}"]
    keys = {"function": "own_agent:rollout"} if kind == "function" else {"command": words, "sandbox": kind == "sandbox"}
    if kind == "sandbox":
        try:
            command_process.check_sandbox()
        except UserError as error:
            pytest.skip(str(error))

    async def play(gateways, model):
        async with (
            asyncio.timeout(60),
            running_pool(tmp_path, num_workers=1, **keys) as pool,
            gateways.session(LIMITS, model.answer, model.parse) as session,
        ):
            return await pool.run(task(), session.endpoint, 60.0), session

    with bench(tmp_path / "model") as running:
        outcome, session = running.runner.run(play(running.gateways, ScriptedModel(running.folder)))
    wanted = Outcome(1.0, error="hello 6") if kind == "function" else Outcome(answer="hello hello")
    assert outcome == wanted and session.notes.delivered == {0, 1}
