"""A rollout function whose agents live in a program with an interpreter of its own.

    agent.function=examples.agents.program:rollout
    agent.kwargs.python=.cache/agents/openai_agents/bin/python
    agent.kwargs.program=examples/agents/openai_agents_calculator.py

A worker starts the program once, for all its trajectories: heavy imports cost nothing then. The
program reads a line {"id", "task", "model"} per trajectory from stdin and answers each by a
line {"id", "reward", ...} of an outcome, in any order, to stdout; {"cancel": id} ends one. It ends
with its stdin.
"""

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.interface import AgentTask, Outcome

MAX_LINE_BYTES = 1 << 20


class Program:
    """A running program, and the trajectories that it works on."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._num_sent = 0
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, python: str, program: str) -> "Program":
        """Start a program; it must not look for packages where this process does."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        pipes = {"stdin": PIPE, "stdout": PIPE, "limit": MAX_LINE_BYTES}
        return cls(await asyncio.create_subprocess_exec(python, program, env=environment, **pipes))

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def ask(self, fields: dict) -> Mapping[str, Any]:
        """Return the program's answer. Raises ConnectionError if it ends before."""
        number = self._num_sent
        self._num_sent += 1
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number} | fields)
            return await answer
        except asyncio.CancelledError:
            with suppress(ConnectionError):
                await self._send({"cancel": number})
            raise
        finally:
            del self._waiting[number]

    async def _send(self, message: dict) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                answer = json.loads(line)
                waiting = self._waiting.get(answer.pop("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()  # after an unreadable line, too
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("the agents' program has ended"))


_programs: dict[tuple[str, str], Program] = {}
_starting = asyncio.Lock()


async def rollout(task: AgentTask, model: Endpoint, *, python: str, program: str) -> Outcome:
    """Let the program play the trajectory; start it if it does not run."""
    key = (python, program)
    async with _starting:
        if key not in _programs or _programs[key].has_ended:
            _programs[key] = await Program.start(*key)
    endpoint = {"base_url": model.base_url, "key": model.key, "name": model.name}
    answer = await _programs[key].ask({"task": asdict(task), "model": endpoint})
    return Outcome(**answer)
