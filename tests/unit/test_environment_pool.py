"""The environment pool, in real processes: a stuck one costs its trajectory,
its worker is replaced."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.envs.environment import Observation, Task
from megatron_dapo.envs.environment_pool import EnvironmentFailure, EnvironmentPool

pytestmark = pytest.mark.unit

HOSTILE = """
import asyncio, os, sys, time
from megatron_dapo.envs.environment import Observation

class Hostile:
    def __init__(self, folder=""):
        self.folder = folder

    def note(self, word):
        with open(os.path.join(self.folder, "notes"), "a") as file:
            print(word, os.getpid(), file=file)

    async def reset(self, task):
        self.note("reset")
        return await self.step(task.prompt)

    async def step(self, response):
        if response == "spin":
            while True:
                pass
        if response == "sleep":
            await asyncio.sleep(600)
        if response == "exit":
            os._exit(3)
        if response == "raise":
            raise ValueError("no such place")
        if response == "hog":
            bytearray(8 << 30)
        if response == "replace":
            sys.modules["__main__"]._plain = lambda observation: {"messages": 3}
        if response == "secrets":
            return Observation(({"role": "user", "content": " ".join({"HF_TOKEN", "MY_API_KEY"} & {*os.environ})},))
        if response == "no observation":
            return "well"
        if response == "no text":
            return Observation(({"role": "user", "content": 3},))
        if response == "half a pair":
            return Observation(({"role": "user", "content": "\\ud800"},))
        if response == "raise half a pair":
            raise ValueError("\\ud800")
        if response == "correct alone":
            return Observation(correct=True)
        if response == "nan":
            return Observation(reward=float("nan"))
        if response == "print":
            print('{"messages": [], "done": true, "reward": 5.0, "correct": true}', flush=True)
        return Observation(({"role": "user", "content": response.upper()},), reward=0.5)

    async def close(self):
        self.note("close")
        if os.path.exists(os.path.join(self.folder, "stuck")):
            time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "hostile_environment.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_pool(folder, use, name="hostile_environment:Hostile", kwargs=None, num_workers=1, step_timeout_s=3.0, **more):
    async def main():
        kwargs_ = {"folder": str(folder)} if kwargs is None else kwargs
        pool = EnvironmentPool(name, kwargs_, num_workers, step_timeout_s, memory_limit_mb=1024, **more)
        await pool.start()
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def task(prompt="hello"):
    return Task(prompt, "test", "", {})


async def failure_of(pool, *responses):
    """Why the environment failed at the last response."""
    with pytest.raises(EnvironmentFailure) as caught:
        async with pool.session() as environment:
            await environment.reset(task())
            for response in responses:
                await environment.step(response)
    return caught.value.reason


async def answer_of(pool, response):
    async with pool.session() as environment:
        await environment.reset(task())
        return await environment.step(response)


ANSWERED = Observation(({"role": "user", "content": "WELL"},), reward=0.5)


def test_environments_see_only_secrets_passed_on_by_name(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "1")
    monkeypatch.setenv("MY_API_KEY", "1")
    for pass_env, seen in (([], ""), (["MY_API_KEY"], "MY_API_KEY")):
        answer = run_pool(folder, lambda pool: answer_of(pool, "secrets"), pass_env=pass_env)
        assert answer.messages[0]["content"] == seen


def test_a_class_that_replaces_parts_of_the_worker_costs_its_trajectory(folder):
    async def use(pool):
        assert (await failure_of(pool, "replace", "well")).startswith("crash: the worker's answer is no observation")
        assert await answer_of(pool, "well") == ANSWERED

    run_pool(folder, use)


def test_each_failure_costs_one_trajectory_and_says_why(folder):
    failures = {
        "exit": "crash",
        "raise": "exception: ValueError: no such place",
        "hog": "exception: MemoryError",
        "no observation": "exception: TypeError: an environment answers with an Observation, not str",
        "no text": "exception: ValueError: an environment's message needs a role and a content of text",
        "half a pair": "exception: UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800'",
        # as text that every file and log can hold
        "raise half a pair": "exception: ValueError: \\ud800",
        "correct alone": "exception: ValueError: an environment's `correct` needs a `reward`",
        "nan": "exception: ValueError: an environment's reward must be a finite number, not nan",
    }

    async def use(pool):
        for response, reason in failures.items():
            assert (await failure_of(pool, "well", response)).startswith(reason), response
            assert await answer_of(pool, "well") == ANSWERED
        assert (await answer_of(pool, "print")).messages[0]["content"] == "PRINT"

    run_pool(folder, use)


def test_others_go_on_while_one_is_stuck_and_the_event_loop_never_stops(folder):
    async def use(pool):
        stuck = asyncio.create_task(failure_of(pool, "spin"))
        await asyncio.sleep(0.1)
        beats = 0
        while not stuck.done():
            assert await answer_of(pool, "well") == ANSWERED
            beats += 1
        return beats, await stuck

    beats, reason = run_pool(folder, use, num_workers=2, step_timeout_s=2.0)
    assert beats > 3 and reason == "timeout"


def notes(folder):
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def test_every_trajectory_has_its_own_environment_which_is_closed(folder):
    async def use(pool):
        await answer_of(pool, "well")
        await failure_of(pool, "raise")
        began = asyncio.Event()

        async def cancelled():
            async with pool.session() as environment:
                await environment.reset(task())
                began.set()
                await asyncio.sleep(600)  # the model writes

        work = asyncio.create_task(cancelled())
        await began.wait()
        work.cancel()
        await answer_of(pool, "well")
        async with pool.session():  # the one before is closed
            pass

    run_pool(folder, use)
    assert [word for word, _ in notes(folder)] == ["reset", "close"] * 4
    assert len({pid for _, pid in notes(folder)}) == 1  # no process was lost


def test_an_environment_cancelled_in_a_step_or_hanging_in_close_is_killed(folder):
    async def use(pool):
        work = asyncio.create_task(answer_of(pool, "sleep"))
        await asyncio.sleep(0.3)
        work.cancel()
        assert await answer_of(pool, "well") == ANSWERED
        (folder / "stuck").touch()
        assert await answer_of(pool, "well") == ANSWERED
        (folder / "stuck").unlink()
        assert await answer_of(pool, "well") == ANSWERED

    run_pool(folder, use, step_timeout_s=2.0)
    assert len({pid for _, pid in notes(folder)}) >= 2


def test_an_unusable_environment_is_refused_at_the_start(folder):
    for name, kwargs, words in (
        ("hostile_environment:Missing", {}, "cannot import"),
        ("hostile_environment:Hostile", {"no": 1}, "environment_kwargs"),
        ("reasoning_gim", {}, "Did you mean 'reasoning_gym'"),
    ):
        with pytest.raises(UserError, match=words):
            run_pool(folder, lambda pool: asyncio.sleep(0), name, kwargs)


def test_workers_start_without_the_heavy_libraries_and_end_with_their_parent(folder):
    heavy = "('torch', 'transformers', 'sympy', 'pydantic')"
    script = f"""
import asyncio, json, os, sys
import megatron_dapo.envs.environment_worker
assert not [name for name in {heavy} if name in sys.modules]
from megatron_dapo.envs.environment_pool import EnvironmentPool

async def main():
    pool = EnvironmentPool("reasoning_gym", {{}}, 1, 5.0, 1024)
    await pool.start()
    print(json.dumps([worker.pid for worker in pool._pool._workers]), flush=True)
    os._exit(0)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    (pid,) = json.loads(done.stdout)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
