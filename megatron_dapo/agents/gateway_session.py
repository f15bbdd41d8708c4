"""One trajectory's requests, in its gateway: their slots, retries, turns, and notes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from megatron_dapo.agents.channel import Channel
from megatron_dapo.agents.conversation import Conversations, TurnPlace
from megatron_dapo.agents.gateways import GatewaySettings
from megatron_dapo.agents.model_requests import Choice, ModelRequest, Reply, check_model
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.agents.parsing import Parser, parsed
from megatron_dapo.agents.turns import Answer, Limits, SessionNotes, Turn, TurnRefused
from megatron_dapo.data.tokenizer import Tokenizer

MAX_IN_FLIGHT = 8
MAX_WAITING = 1000
_END_S = 2.0  # for answers that are being written while the trajectory ends
_ENDING_LIMITS = ("max_turns", "max_branches")


@dataclass(frozen=True)
class GatewayParts:
    """Parts that all sessions of a gateway share."""

    settings: GatewaySettings
    tokenizer: Tokenizer
    tool_parser: Parser
    reasoning_parser: Parser
    texts: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    """One thread for all work of `Conversations`: megabytes of messages take seconds to render,
    while other trajectories are to be heard. The chat template can be used by one thread."""


@dataclass(eq=False)
class _Running:
    """A request under way or answered, and the number of connections that wait for it."""

    task: asyncio.Task[Reply]
    num_readers: int = 0


class GatewaySession:
    """A trajectory: its conversations, its requests under way, and what was seen of them."""

    def __init__(self, number: int, parts: GatewayParts, limits: Limits, channel: Channel) -> None:
        self.limits = limits
        self.notes = SessionNotes()
        self._number = number
        self._parts = parts
        self._channel = channel
        settings = parts.settings
        self._conversations = Conversations(
            parts.tokenizer, limits, settings.history, settings.template_kwargs, settings.apply_chat_template
        )
        self._requests = count()
        self._num_turns = 0  # with those under way
        self._is_closed = False
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._num_waiting = 0
        self._holders: set[asyncio.Task] = set()  # connections with a slot
        self._running: dict[bytes, _Running] = {}  # the last one of each body
        self._under_way: set[asyncio.Task] = set()
        self._orphans: dict[_Running, asyncio.TimerHandle] = {}
        self._told: set[asyncio.Task] = set()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place among the requests under way. Raises TurnRefused."""
        if self._num_waiting >= MAX_WAITING:
            raise TurnRefused(403, "too_many_requests", f"{MAX_WAITING} requests of this key wait already.")
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        holder = asyncio.current_task()
        assert holder is not None, "of a connection"
        self._holders.add(holder)
        try:
            self.check_open()
            yield
        finally:
            self._holders.discard(holder)
            self._slots.release()

    @asynccontextmanager
    async def joined(
        self, body: bytes, is_retry: bool, start: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> AsyncIterator[asyncio.Task[Reply]]:
        """Lend the task that answers a body; a retry gets that of the request before, also if it has
        answered.

        Without a reader for `retry_wait_s` it is cancelled; sooner if many have none.

        body: its hash.
        """
        self.check_open()
        running = self._running.get(body) if is_retry else None
        if running is None or running.task.cancelling():
            running = self._running[body] = _Running(asyncio.create_task(start()))
            self._under_way.add(running.task)
            running.task.add_done_callback(partial(self._finish, body))
        if expiry := self._orphans.pop(running, None):
            expiry.cancel()
        running.num_readers += 1
        try:
            yield running.task
        finally:
            running.num_readers -= 1
            if not running.num_readers and not running.task.done():
                later = asyncio.get_running_loop().call_later(self._parts.settings.retry_wait_s, self._give_up, running)
                self._orphans[running] = later
                if len(self._orphans) > MAX_IN_FLIGHT:
                    self._give_up(next(iter(self._orphans)))

    def _finish(self, body: bytes, task: asyncio.Task) -> None:
        self._under_way.discard(task)
        is_error = task.cancelled() or task.exception()  # which holds all that it came of
        if is_error and body in self._running and self._running[body].task is task:
            del self._running[body]

    def _give_up(self, running: _Running) -> None:
        self._orphans.pop(running).cancel()
        running.task.cancel()

    def check_open(self) -> None:
        """Raise TurnRefused after the trajectory's end."""
        if self._is_closed:
            raise TurnRefused(403, "key_closed", "The trajectory of this key has ended.")

    async def end(self) -> SessionNotes:
        """Take no further request, end those under way, and return the notes."""
        self._is_closed = True
        for task in self._under_way:
            task.cancel()
        if self._holders:
            _, late = await asyncio.wait(self._holders, timeout=_END_S)
            for holder in late:  # a client that does not read, or does not end its body
                holder.cancel()
        self.notes.counts["retokenized"] = self._conversations.num_retokenized
        return self.notes

    def add(self, name: str) -> None:
        """Count something of `COUNTS`."""
        self.notes.counts[name] = self.notes.counts.get(name, 0) + 1

    def note_refusal(self, refused: TurnRefused) -> None:
        """Note a request that got an error; tell the controller of limits that end a trajectory."""
        if self._is_closed:
            return
        self.add("refused")
        self.notes.refusal = refused.code
        if refused.code in _ENDING_LIMITS and not self._told:
            fields = {"session": self._number, "code": refused.code}
            self._told.add(asyncio.create_task(self._channel.ask("limit", fields)))

    def note_delivery(self, reply: Reply) -> None:
        """Note that a client has been written a whole answer."""
        self.notes.delivered |= {answer.node for answer in reply.answers}
        self.notes.refusal = None

    async def post(self, outcome: dict[str, Any]) -> None:
        """Tell the controller the agent's outcome. Raises TurnRefused."""
        try:
            await self._channel.ask("posted", {"session": self._number, "outcome": outcome_of(outcome)})
        except ValueError as error:
            raise TurnRefused(400, "invalid_value", str(error)) from None

    async def num_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens that the model would read. Raises TurnRefused."""
        check_model(request.model, self._parts.settings.model_name)
        return await self._in_thread(self._conversations.num_tokens, request.messages, request.tools)

    async def answer(self, request: ModelRequest) -> Reply:
        """Return the answers to a request. Raises TurnRefused, ChannelClosed, RuntimeError."""
        num = request.num_choices
        if self._num_turns + num > self.limits.max_turns:
            raise TurnRefused(403, "max_turns", f"The trajectory has had its {self.limits.max_turns} turns.")
        self._num_turns += num
        try:
            return await self._answer(request)
        except BaseException:
            self._num_turns -= num
            raise

    async def _answer(self, request: ModelRequest) -> Reply:
        if request.ids is None:
            check_model(request.model, self._parts.settings.model_name)
        placing = self._parts.texts.submit(self._place, request)
        try:
            place = await asyncio.wrap_future(placing)
        except asyncio.CancelledError:
            placing.add_done_callback(self._forget)
            raise
        room = min(place.room, request.max_tokens or place.room)
        turn = Turn(next(self._requests), place.parent, place.suffix, room, request.num_choices, request.stop)
        try:
            fields = await self._channel.ask("turn", {"session": self._number, "turn": turn})
        except BaseException:
            self._forget(placing)
            raise
        answers = [Answer(**answer) for answer in fields]
        return Reply(
            identity=f"{self._number}-{turn.request}",
            model=self._parts.settings.model_name,
            created=int(time.time()),
            choices=[await self._shown(place, request, answer) for answer in answers],
            answers=answers,
            num_prompt=place.num_prompt,
            num_cached=place.num_cached,
        )

    def _place(self, request: ModelRequest) -> TurnPlace:
        if request.ids is not None:
            return self._conversations.place_tokens(request.ids)
        most = self.limits.max_prompt_tokens + self.limits.max_response_tokens
        if len(request.messages) > most:  # no template shows a message without a token
            words = f"This model's maximum context length is {most} tokens, fewer than there are messages."
            raise TurnRefused(400, "context_length_exceeded", words)
        return self._conversations.place(request.messages, request.tools, request.num_choices)

    def _forget(self, placing: "Future[TurnPlace]") -> None:
        """Drop the place of a request that gets no answer."""
        if not placing.cancelled() and placing.exception() is None:
            self._parts.texts.submit(self._conversations.drop, placing.result())

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._parts.texts, work, *arguments)

    async def _shown(self, place: TurnPlace, request: ModelRequest, answer: Answer) -> Choice:
        """Add a node for an answer; return the answer as its client is shown it."""
        if request.ids is not None:
            await self._in_thread(self._conversations.add, place, answer, None)
            return Choice({}, answer.finish_reason, None, [])
        text = await self._in_thread(self._conversations.read, place, answer.tokens, request.stop)
        parsers = self._parts.tool_parser, self._parts.reasoning_parser
        shown = await parsed(text, request.tools, self._parse, *parsers)
        if shown.is_ill_formed:
            self.add("ill_formed")
        message: dict[str, Any] = {"role": "assistant", "content": shown.content}
        if shown.reasoning:
            message["reasoning_content"] = shown.reasoning
        if shown.tool_calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in shown.tool_calls]
            message["tool_calls"] = [
                {"id": f"call_{answer.node}_{index}", "type": "function", "function": function}
                for index, function in enumerate(functions)
            ]
        await self._in_thread(self._conversations.add, place, answer, message)
        is_call = shown.tool_calls and answer.finish_reason == "stop"
        decode = self._parts.tokenizer.decode
        names = [decode([token], skip_special_tokens=False) for token in answer.tokens if request.wants_log_probs]
        return Choice(message, "tool_calls" if is_call else answer.finish_reason, text.stop, names)

    async def _parse(self, route: str, fields: dict[str, Any]) -> Any:
        try:
            return await self._channel.ask("parse", {"session": self._number, "route": route, "fields": fields})
        except TurnRefused as error:
            raise ValueError(str(error)) from error
