"""The examples' adapters, each with the program of other people that it serves."""

import asyncio
import json
import subprocess
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from examples.agents import program as program_room
from examples.agents.openenv_session import OpenEnv
from examples.agents.repairs import FUNCTIONS, rows
from megatron_dapo.agents.interface import AgentTask
from megatron_dapo.envs.environment import Task
from megatron_dapo.rewards.code.reward import code_tests
from tests.agents.environments import EXAMPLES, PROGRAMS, python_of, run_program, task_of
from tests.agents.scripted_endpoint import ScriptedEndpoint, call, calls, scripted_endpoint

pytestmark = pytest.mark.e2e

CALCULATOR = str(EXAMPLES / "openai_agents_calculator.py")


async def play(endpoint: ScriptedEndpoint, *products: str) -> list:
    """Play one trajectory for each product, all at once, in one program."""
    python = str(python_of("openai_agents"))
    model = SimpleNamespace(base_url=f"{endpoint.url}/t/KEY/v1", key="KEY", name="policy")
    tasks = [AgentTask(p, [{"role": "user", "content": p}], "calculator", str(eval(p[:-1]))) for p in products]
    playing = (program_room.rollout(task, model, python=python, program=CALCULATOR) for task in tasks)
    return await asyncio.gather(*playing, return_exceptions=True)


def calculates(number: int, body: dict) -> dict:
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"content": last["content"]}
    return call("A", expression=last["content"].removesuffix("?"))


async def ended(playing: Coroutine) -> Any:
    """Return the result of `playing`, with the programs that it started ended."""
    try:
        return await playing
    finally:
        for program in program_room._programs.values():
            program._process.stdin.close()
            await program._process.wait()
            await program._reader
        program_room._programs.clear()


def test_one_program_plays_many_trajectories_at_once():
    products = [f"{a}*{b}?" for a in range(10, 14) for b in range(20, 24)]

    async def run() -> list:
        outcomes = await play(endpoint, *products)
        assert len(program_room._programs) == 1
        return outcomes

    with scripted_endpoint(calculates) as endpoint:
        outcomes = asyncio.run(ended(run()))
    assert [outcome.correct for outcome in outcomes] == [True] * len(products)
    assert len(endpoint.requests) == 2 * len(products)


def test_a_program_that_dies_fails_its_trajectories_and_is_started_again():
    async def run() -> tuple[list, list]:
        await play(endpoint, "2*3?")
        (running,) = program_room._programs.values()
        dying = asyncio.create_task(play(endpoint, "4*5?", "6*7?"))
        await asyncio.sleep(0)
        running._process.kill()
        return await dying, await play(endpoint, "8*9?")

    with scripted_endpoint(calculates) as endpoint:
        dead, (outcome,) = asyncio.run(ended(run()))
    assert all(isinstance(error, ConnectionError) for error in dead)
    assert outcome.correct


def mended(number: int, body: dict) -> dict:
    """Forget the call once, mend the module, submit it."""
    commands = ["sed -i s/-/+/ solution.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    return {"content": "no call"} if number == 0 else calls(("bash", {"command": commands[number - 1]}))


def test_mini_swe_agent_mends_a_module_that_the_hidden_tests_accept(tmp_path):
    row = next(rows())
    (message,) = row["prompt"]
    program = EXAMPLES / "mini_swe_agent_repair.py"
    with scripted_endpoint(mended) as endpoint:
        result = run_program("mini_swe_agent", program, endpoint.url, task_of(message["content"]), tmp_path)
    assert result["metrics"] == {"submitted": 1.0}
    assert code_tests("repairs", result["answer"], row["reward_model"]["ground_truth"], {})["correct"]
    _, dropped, *_ = endpoint.bodies()
    assert [message["role"] for message in dropped["messages"]] == ["system", "user", "user"]


def test_the_faults_of_the_repairs_fail_their_tests_and_the_right_lines_pass():
    for row, (_, lines, pair, _) in zip(rows(), FUNCTIONS, strict=True):
        truth = row["reward_model"]["ground_truth"]
        answers = [f"```python\n{lines.format(words)}```" for words in pair]
        assert [code_tests("repairs", answer, truth, {})["correct"] for answer in answers] == [True, False], lines
        hidden = json.loads(truth)["assert_case"][1:]
        assert not any(line in row["prompt"][0]["content"] for line in hidden)


def test_an_environment_of_openenv_plays_through_its_own_server():
    command = [python_of("openenv"), PROGRAMS / "openenv_number_server.py"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    async def play(number: int, *turns: str) -> list:
        environment = OpenEnv(f"ws://127.0.0.1:{port}/ws", action="number", shown="text")
        seen = [await environment.reset(Task("", "openenv", "", {"reset": {"number": number}}))]
        time.sleep(1)  # a model that writes: some of the server's pings, and no call of the environment
        seen += [await environment.step(turn) for turn in turns]
        await environment.close()
        return seen

    try:
        port = int(server.stdout.readline())
        first, wrong, right = asyncio.run(play(7, "3", "7"))
        other = asyncio.run(play(3, "3"))[-1]
    finally:
        server.terminate()
        server.wait(30)
    assert [seen.messages[0]["content"] for seen in (first, wrong, right)] == ["Guess.", "Wrong.", "Right."]
    assert (wrong.done, right.done, right.reward, other.reward) == (False, True, 1.0, 1.0)
