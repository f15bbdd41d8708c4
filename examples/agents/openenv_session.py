"""An environment of OpenEnv, behind its server's address, as an environment of several turns.

    multi_turn.environment=examples.agents.openenv_session:OpenEnv
    multi_turn.environment_kwargs.url=ws://127.0.0.1:8000/ws  multi_turn.environment_kwargs.action=message

It speaks the server's WebSocket protocol (reset, step, close) and needs no package of OpenEnv. The
row's extra_info.reset has the arguments of its `reset`. `environment_kwargs`: url; action: the field
of the action that takes the model's text, "" for a turn that is the whole action as JSON; shown: the
field of the observation that the model reads, "" for all of it as JSON.
"""

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any

from aiohttp import ClientSession, WSMsgType

from megatron_dapo.envs.environment import Observation, Task

MAX_BYTES = 1 << 22  # of a server's message


class Connection:
    """A socket in a thread of its own: a server's pings are answered while the model writes, too."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._answers: asyncio.Queue[dict] = asyncio.Queue()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def run(self, work: Coroutine) -> Any:
        """Return the result of a coroutine of this object, in its thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def open(self, url: str) -> None:
        self._session = ClientSession()
        self._socket = await self._session.ws_connect(url, max_msg_size=MAX_BYTES)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is WSMsgType.TEXT:
                self._answers.put_nowait(json.loads(message.data))
        self._answers.put_nowait({"type": "closed", "data": {"message": "it closed the connection"}})

    async def ask(self, kind: str, data: dict) -> dict:
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._answers.get()
        if answer["type"] != "observation":
            raise RuntimeError(f"the OpenEnv server: {answer['data'].get('message', answer)!s:.200}")
        return answer["data"]

    async def close(self) -> None:
        await self._socket.close()
        await self._session.close()
        self._loop.call_soon(self._loop.stop)


class OpenEnv:
    def __init__(self, url: str, action: str = "", shown: str = "") -> None:
        self._url, self._action, self._shown = url, action, shown
        self._connection: Connection | None = None

    async def reset(self, task: Task) -> Observation:
        """Open a session of the server, and begin the task there."""
        self._connection = Connection()
        await self._connection.run(self._connection.open(self._url))
        return await self._ask("reset", task.extra_info.get("reset", {}))

    async def step(self, response: str) -> Observation:
        """Take the action of the model's turn; an unreadable one is told, and costs the turn."""
        try:
            action = {self._action: response} if self._action else json.loads(response)
        except ValueError:
            action = None
        if not isinstance(action, dict):
            return Observation(({"role": "user", "content": "error: an action is a JSON object"},), reward=0.0)
        return await self._ask("step", action)

    async def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            await self._connection.run(self._connection.close())

    async def _ask(self, kind: str, data: dict) -> Observation:
        assert self._connection is not None, "reset() comes before step()"
        answer = await self._connection.run(self._connection.ask(kind, data))
        seen = answer["observation"]
        text = str(seen[self._shown]) if self._shown else json.dumps(seen, ensure_ascii=False)
        message = {"role": "user", "content": text}
        return Observation((message,), done=bool(answer.get("done")), reward=float(answer.get("reward") or 0.0))
