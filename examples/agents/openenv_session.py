"""An environment of OpenEnv, behind its server's address, as an environment of several turns.

    multi_turn.environment=examples.agents.openenv_session:OpenEnv
    multi_turn.environment_kwargs.url=ws://127.0.0.1:8000/ws  multi_turn.environment_kwargs.action=message

It speaks the server's WebSocket protocol (reset, step, close) and needs no package of OpenEnv. The
row's extra_info.reset has the arguments of its `reset`. `environment_kwargs`: url; action: the field
of the action that takes the model's text, "" for a turn that is the whole action as JSON; shown: the
field of the observation that the model reads, "" for all of it as JSON.
"""

import json
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

from megatron_dapo.envs.environment import Observation, Task

MAX_BYTES = 1 << 22  # of a server's message


class OpenEnv:
    def __init__(self, url: str, action: str = "", shown: str = "") -> None:
        self._url, self._action, self._shown = url, action, shown
        self._session: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None

    async def reset(self, task: Task) -> Observation:
        """Open a session of the server, and begin the task there."""
        self._session = ClientSession()
        # the event loop runs only during calls, so no ping would be answered between them
        self._socket = await self._session.ws_connect(self._url, max_msg_size=MAX_BYTES, autoping=True)
        return self._observation(await self._ask("reset", task.extra_info.get("reset", {})))

    async def step(self, response: str) -> Observation:
        """Take the action that the model's turn holds; an unreadable one is told, and costs a turn."""
        if self._action:
            action: Any = {self._action: response}
        else:
            try:
                action = json.loads(response)
            except ValueError:
                action = None
        if not isinstance(action, dict):
            return Observation(({"role": "user", "content": "error: an action is a JSON object"},), reward=0.0)
        return self._observation(await self._ask("step", action))

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    async def _ask(self, kind: str, data: dict) -> dict:
        assert self._socket is not None, "reset() comes before step()"
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json()
        if answer["type"] != "observation":
            raise RuntimeError(f"the OpenEnv server: {answer['data'].get('message', answer)!s:.200}")
        return answer["data"]

    def _observation(self, data: dict) -> Observation:
        seen = data["observation"]
        text = str(seen[self._shown]) if self._shown else json.dumps(seen, ensure_ascii=False)
        reward = float(data.get("reward") or 0.0)
        return Observation(({"role": "user", "content": text},), done=bool(data.get("done")), reward=reward)
