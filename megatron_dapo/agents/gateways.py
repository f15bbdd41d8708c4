"""The controller's side of the gateways, the processes that speak HTTP with agents."""

import asyncio
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np

from megatron_dapo.agents.channel import Channel, ChannelClosed, open_channel
from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.interface import Outcome
from megatron_dapo.agents.parsing import Parse
from megatron_dapo.agents.turns import AnswerTurn, Limits, SessionNotes, Turn, TurnRefused
from megatron_dapo.common.errors import UserError
from megatron_dapo.data.token_arrays import TOKEN
from megatron_dapo.rewards.worker_environment import worker_environment
from megatron_dapo.rewards.worker_pool import WorkerLost

_MODULE = "megatron_dapo.agents.gateway_process"
_START_S = 60.0
_DEATH_S = 5.0

log = logging.getLogger(__name__)


class GatewayLost(Exception):
    """The gateway of a trajectory has ended, and with it the trajectory's conversations."""


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of a gateway; names as in the section `rollout.agent`."""

    model: str
    """Folder with tokenizer and chat template."""
    model_name: str
    host: str = "127.0.0.1"
    port: int | None = None
    """Of the first gateway."""
    public_url: str | None = None
    max_request_mb: int = 16
    history: Literal["tokens", "rendered"] = "tokens"
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = True
    answer_timeout_s: float = 60.0
    """For a gateway's own answers to the controller; then it is killed."""
    retry_wait_s: float = 5.0
    """A request goes on for so long without a client."""
    keep_alive_s: float = 30.0
    """Between two signs of life to a waiting client: clients give up after 600 s without one."""
    silence_s: float = 30.0
    """For a connection's first request, and for the rest of a body."""
    socket: str = ""
    """Of one gateway: its Unix socket."""


class Session:
    """One trajectory at its gateway."""

    def __init__(self, process: "_Process", key: str, reward_key: str, answer: AnswerTurn, parse: Parse) -> None:
        url, settings = process.url, process.settings
        self.endpoint = Endpoint(
            base_url=f"{url}/t/{key}/v1",
            anthropic_url=f"{url}/t/{key}",
            key=key,
            name=settings.model_name,
            reward_url=f"{url}/reward",
            reward_key=reward_key,
            socket=settings.socket,
        )
        self.notes = SessionNotes()
        """Complete after `close_requests`; empty before."""
        self.lost = process.lost
        self.limit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with the first refusal by max_turns or max_branches: its code."""
        self._process = process
        self._answer = answer
        self._parse = parse

    @property
    def posted(self) -> Outcome | None:
        """Return the agent's own outcome, by POST to `reward_url`."""
        return self.notes.posted

    async def close_requests(self) -> None:
        """Have further requests refused (403) and running ones ended. Raises GatewayLost."""
        notes = await self._process.ask("end", session=self.endpoint.key)
        posted = notes.pop("posted")
        self.notes = SessionNotes(set(notes.pop("delivered")), **notes, posted=posted and Outcome(**posted))

    async def take(self, name: str, fields: dict[str, Any]) -> Any:
        """Answer a question of the gateway."""
        if name == "turn":
            turn = fields["turn"]
            turn |= {"suffix": np.array(turn["suffix"], TOKEN), "stop": tuple(turn["stop"])}
            return await self._answer(Turn(**turn))
        if name == "parse":
            try:
                return await self._parse(fields["route"], fields["fields"])
            except ValueError as error:  # ill-formed, and no fault of ours
                raise TurnRefused(400, "ill_formed", str(error)) from error
        if not self.limit.done():
            self.limit.set_result(fields["code"])
        return None


class _Process:
    """One gateway's process, from its start to its end."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.sessions: dict[str, Session] = {}  # by their keys
        self.url = ""
        self.lost = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        """Start the process. Raises UserError, WorkerLost."""
        ours, its = socket.socketpair()
        try:
            with its:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", _MODULE),
                    stdin=its.fileno(),
                    env=worker_environment(os.environ, (), "") | {"TOKENIZERS_PARALLELISM": "false"},
                    start_new_session=True,  # untouched by Ctrl-C
                )
            self._channel = await open_channel(ours, self._take)
            self._serving = asyncio.create_task(self._serve(self._channel, self._process))
            async with asyncio.timeout(_START_S):
                started = await self._channel.ask("start", self.settings)
            if "user_error" in started:
                raise UserError(started["user_error"])
        except BaseException as error:  # cancelled, too: nobody may take it for ready
            await self.close()
            ours.close()
            if isinstance(error, (ChannelClosed, TurnRefused, OSError)):
                raise WorkerLost(f"a gateway did not start within {_START_S:g} s: {error!r}") from error
            raise
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        self.url = (self.settings.public_url or "").rstrip("/") or f"http://{host}:{started['port']}"

    async def ask(self, name: str, **fields: Any) -> Any:
        """Return the gateway's answer. Raises GatewayLost, also for one that does not answer."""
        assert self._channel is not None, "start() comes first"
        try:
            async with asyncio.timeout(self.settings.answer_timeout_s):
                return await self._channel.ask(name, fields)
        except (ChannelClosed, TurnRefused) as error:
            raise GatewayLost(f"the gateway at {self.url} has ended, or failed: {error}") from error
        except TimeoutError:
            self._kill()
            raise GatewayLost(f"the gateway at {self.url} did not answer {name!r} in time; it is killed") from None

    async def end_session(self, *keys: str) -> None:
        """Close its keys, as far as they are open."""
        with suppress(GatewayLost):
            await self.ask("close", keys=keys)
        del self.sessions[keys[0]]

    async def close(self) -> None:
        """Kill the process, and wait until it is gone. Idempotent."""
        self.lost.set()
        self._kill()
        if self._process is not None:
            await self._process.wait()
        if self._serving is not None:
            await self._serving

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._process is not None:
                self._process.kill()

    async def _serve(self, channel: Channel, process: asyncio.subprocess.Process) -> None:
        await channel.serve()
        if self.sessions:
            log.error("the gateway at %s has ended; its %d trajectories are lost", self.url, len(self.sessions))
        self.lost.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                await process.wait()
        self._kill()  # it had closed only its socket

    async def _take(self, name: str, fields: dict[str, Any]) -> Any:
        return await self.sessions[fields["session"]].take(name, fields)


class Gateways:
    """The gateways of a run."""

    def __init__(self, settings: GatewaySettings, num_gateways: int) -> None:
        """Prepare the processes; `start` starts them."""
        self._settings = settings
        self._folder: Path | None = None  # of a running one
        self._processes: list[_Process | None] = [None] * num_gateways
        self._locks = [asyncio.Lock() for _ in range(num_gateways)]

    async def start(self) -> None:
        """Start all. Raises UserError for a taken port or a template that cannot be continued,
        WorkerLost."""
        self._folder = Path(tempfile.mkdtemp(prefix="megatron_dapo-"))  # closed to others
        starts = [self._running(index) for index in range(len(self._processes))]
        results = await asyncio.gather(*starts, return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            await self.close()
            raise errors[0]

    @asynccontextmanager
    async def session(self, limits: Limits, answer: AnswerTurn, parse: Parse) -> AsyncIterator[Session]:
        """Open the keys of a trajectory, and close them at the end.

        Raises GatewayLost if its gateway ends meanwhile, or does not start again.
        """
        key, reward_key = keys = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        try:
            process = await self._running(crc32(key.encode()) % len(self._processes))
        except (UserError, WorkerLost) as error:
            raise GatewayLost(str(error)) from error
        session = process.sessions[key] = Session(process, key, reward_key, answer, parse)
        try:
            await process.ask("open", limits=limits, keys=keys)
            yield session
            await session.close_requests()
        finally:
            await asyncio.shield(process.end_session(*keys))  # to its end, also if cancelled again

    async def close(self) -> None:
        """End all; sessions in use are lost. Idempotent."""
        folder, self._folder = self._folder, None
        await asyncio.gather(*(process.close() for process in self._processes if process is not None))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def _running(self, index: int) -> _Process:
        """Return a gateway's process, another one after its end. Raises UserError, WorkerLost."""
        async with self._locks[index]:
            process = self._processes[index]
            if process is not None and not process.lost.is_set():
                return process
            if process is not None:
                await process.close()  # its port is free then
            if self._folder is None:
                raise WorkerLost("the gateways are closed")
            port = self._settings.port and self._settings.port + index
            settings = replace(self._settings, port=port, socket=str(self._folder / f"gateway{index}"))
            process = self._processes[index] = _Process(settings)
            await process.start()
            return process
