"""The agent pool with rollout functions, in real processes: a failure costs its trajectory, a lost
worker all of its own, and each is said in a sentence."""

import asyncio
import math
import os

import pytest

from megatron_dapo.agents import command_process
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.common.errors import UserError
from tests.agent_pools import endpoint, failure, in_pool, running_pool, task

pytestmark = pytest.mark.unit

FUNCTIONS = """
import asyncio, os, signal, subprocess, sys, time
from dataclasses import asdict
from megatron_dapo.agents.command_process import run_in_sandbox
from megatron_dapo.agents.interface import Outcome

number = 3

def not_async(task, model):
    return Outcome()

async def rollout(task, model, folder="", **kwargs):
    def note(text):
        with open(os.path.join(folder, "notes"), "a") as file:
            print(text, file=file)
    word = task.prompt
    if word == "echo":
        assert (task.messages, task.ground_truth, task.number) == ([{"role": "user", "content": "echo"}], "42", 2)
        return Outcome(0.5, True, None, {"tools": len(model.key), "pid": os.getpid()})
    if word == "secrets":
        return Outcome(error=" ".join({"HF_TOKEN", "MY_API_KEY"} & {*os.environ}))
    if word == "raise":
        raise ValueError("no such place")
    if word == "exit":
        sys.exit(3)
    if word == "cancel":
        raise asyncio.CancelledError("no one asked")
    if word == "late":
        async with asyncio.timeout(0.01):
            await asyncio.sleep(600)
    if word == "nothing":
        return None
    if word == "nan":
        return Outcome(float("nan"))
    if word == "text":
        return Outcome("high")
    if word == "forged":
        outcome = Outcome(0.0)
        object.__setattr__(outcome, "reward", float("nan"))
        return outcome
    if word == "many":
        return Outcome(1.0, metrics={str(i): 1.0 for i in range(100_000)})
    if word == "long":
        return Outcome(1.0, error="x" * (2 << 20))
    if word == "large":
        return Outcome(answer="\U0001f600" * (1 << 20))
    if word == "too large":
        return Outcome(answer="x" * (1 << 20) + "x")
    if word == "half a pair":
        raise ValueError("\\ud800")
    if word == "end":
        os._exit(7)
    if word == "sandbox":
        ended = await run_in_sandbox(["sh", "-c", "cat sum; exit 3"], files={"sum": task.ground_truth})
        return Outcome(error=f"{ended.exit_code} {ended.output}")
    if word == "numpy":
        import numpy
        return Outcome(numpy.float32(0.5), metrics={"x": numpy.int64(3)})
    if word == "block":
        note("block")
        time.sleep(600)
    if word == "stubborn":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                note("stubborn")
    if word == "child":
        note(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        os._exit(1)
    try:
        note("waits")
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0)
        note("finally")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_agents.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def with_function(folder, use, name="own_agents:rollout", **keys):
    keys = {"num_workers": 1, "kwargs": {"folder": str(folder)}} | keys
    return in_pool(folder, use, function=name, **keys)


async def noted(folder, word, times=1):
    """Wait until functions have noted the word so often."""
    path = folder / "notes"
    while not path.exists() or path.read_text().split().count(word) < times:
        await asyncio.sleep(0.01)


FAILURES = {
    "raise": "exception: ValueError: no such place",
    "exit": "exception: SystemExit: 3",
    "cancel": "exception: RuntimeError: the function ended by its own CancelledError('no one asked')",
    "late": "exception: RuntimeError: the function ended by its own TimeoutError()",
    "nothing": "exception: TypeError: a rollout function returns an Outcome, not NoneType",
    "nan": "exception: ValueError: an agent's reward must be a finite number, not nan",
    "text": "exception: TypeError",
    "forged": "exception: ValueError: an agent's outcome, reward: Input should be a finite number",
    "many": "exception: ValueError: an agent's outcome, metrics: Dictionary should have at most 64 items",
    "long": "exception: ValueError: an agent's outcome, error: String should have at most 1000 characters",
    "too large": "exception: ValueError: an agent's outcome, answer: String should have at most 1048576 characters",
    "half a pair": "exception: ValueError: \\ud800",  # as text that every file can hold
    "end": "crash: ",
}


def test_a_function_gets_its_task_and_endpoint_and_each_failure_is_a_sentence(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "1")
    monkeypatch.setenv("MY_API_KEY", "1")

    async def use(pool):
        outcome = await pool.run(task("echo", number=2), endpoint(), math.inf)
        assert (outcome.reward, outcome.correct, outcome.metrics["tools"]) == (0.5, True, 43)
        assert outcome.metrics["pid"] != os.getpid()
        assert (await pool.run(task("secrets"), endpoint(), 60.0)).error == "MY_API_KEY"
        assert await pool.run(task("numpy"), endpoint(), 60.0) == Outcome(0.5, metrics={"x": 3.0})
        assert len((await pool.run(task("large"), endpoint(), 60.0)).answer) == 1 << 20
        for word, reason in FAILURES.items():
            assert (await failure(pool, word)).startswith(reason), word
            assert (await pool.run(task("secrets"), endpoint(), 60.0)).reward is None, "the next one is served"

    with_function(folder, use, pass_env=["MY_API_KEY"])


def test_a_function_runs_a_tool_in_a_sandbox(folder):
    try:
        command_process.check_sandbox()
    except UserError as error:
        pytest.skip(str(error))
    assert with_function(folder, lambda pool: pool.run(task("sandbox"), endpoint(), 60.0)).error == "3 42"


def test_the_end_of_a_worker_fails_all_its_trajectories_and_repeats_none(folder):
    async def use(pool):
        waiting = [asyncio.create_task(failure(pool, "wait")) for _ in range(3)]
        await noted(folder, "waits", 3)
        assert (await failure(pool, "child")).startswith("crash: ")
        assert all(reason.startswith("crash: ") for reason in await asyncio.gather(*waiting))
        assert (await pool.run(task("secrets"), endpoint(), 60.0)).reward is None, "the worker was replaced"
        *words, child = (folder / "notes").read_text().split()
        assert words == ["waits"] * 3, "none was run again"
        assert not os.path.exists(f"/proc/{child}"), "what it started has ended too"

    with_function(folder, use)


def test_a_cancelled_function_runs_its_finally_and_a_stubborn_one_loses_its_worker(folder, monkeypatch):
    monkeypatch.setattr("megatron_dapo.agents.agent_pool._GRACE_S", 0.3)

    async def use(pool):
        running = asyncio.create_task(pool.run(task("wait"), endpoint(), 60.0))
        await noted(folder, "waits")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (folder / "notes").read_text().split() == ["waits", "finally"], "before the caller goes on"
        assert await failure(pool, "wait", timeout_s=0.2) == "timeout"
        assert (folder / "notes").read_text().split() == ["waits", "finally"] * 2
        assert (await failure(pool, "stubborn", timeout_s=0.2)).startswith("timeout")
        # one that blocks the loop: it and its neighbour end by its time
        neighbour = asyncio.create_task(failure(pool, "wait"))
        await noted(folder, "waits", 3)
        blocking = asyncio.create_task(pool.run(task("block"), endpoint(), math.inf))
        await noted(folder, "block")
        blocking.cancel()
        assert (await neighbour).startswith("crash: ")
        with pytest.raises(asyncio.CancelledError):
            await blocking
        assert (await pool.run(task("secrets"), endpoint(), 60.0)).reward is None

    with_function(folder, use)


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("own_agents:rolout", {}, "cannot import 'own_agents:rolout'"),
        ("no_agents:rollout", {}, "No module named 'no_agents'"),
        ("own_agents:not_async", {}, "own_agents:not_async is no async function"),
        ("own_agents:number", {}, "own_agents:number is no async function"),
        ("own_agents:rollout", {"task": 1}, "cannot be called with a task, a model and agent.kwargs {'task': 1}"),
    ],
)
def test_an_unusable_function_is_one_sentence_at_the_start(folder, name, kwargs, sentence):
    async def start():
        async with running_pool(folder, function=name, kwargs=kwargs, num_workers=1):
            pass

    with pytest.raises(UserError) as error:
        asyncio.run(start())
    assert len(error.value.sentences) == 1 and sentence in error.value.sentences[0]
    assert "actor_rollout_ref.rollout.agent.function" in error.value.sentences[0]


def test_an_unset_variable_of_pass_env_is_named(folder):
    with pytest.raises(UserError, match=r"rollout.agent.pass_env names NO_SUCH_KEY"):
        with_function(folder, None, pass_env=["NO_SUCH_KEY"])


@pytest.mark.parametrize(
    "value",
    [
        [],
        "{}",
        None,
        {"reward": "high"},
        {"reward": math.inf},
        {"reward": []},
        {"correct": True},
        {"reward": 1, "correct": "yes please"},
        {"error": 3},
        {"metrics": {"x": None}},
        {"metrics": {"x": math.nan}},
        {"metrics": {"x" * 65: 1}},
        {"metrics": {str(i): 1 for i in range(65)}},
        {"reward": 1, "rewards": 1},
        {"reward": 1, "answer": "text"},
        {"answer": 5},
        {1: 2},
    ],
)
def test_no_outcome_is_made_of_anything_else(value):
    with pytest.raises(ValueError) as error:
        outcome_of(value)
    assert type(error.value) is ValueError and "an agent's" in str(error.value) and len(str(error.value)) < 300


def test_an_outcome_is_read_from_its_fields():
    assert outcome_of({}) == Outcome()
    assert outcome_of({"reward": 1, "correct": False, "metrics": {"x": 2}}) == Outcome(1.0, False, None, {"x": 2.0})
    assert AgentTask(**vars(task())) == task()
