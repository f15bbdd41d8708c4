"""One trajectory's requests, in its gateway: their slots, retries, turns, and notes."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_dapo.agents.channel import Channel
from megatron_dapo.agents.conversation import Conversations, TurnPlace
from megatron_dapo.agents.gateways import GatewaySettings
from megatron_dapo.agents.model_requests import Choice, ModelRequest, Reply
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
class _Request:
    """A request under way or answered, and the number of connections that wait for it."""

    body: bytes  # its hash
    task: asyncio.Task[Reply]
    num_readers: int = 0
    expiry: asyncio.TimerHandle | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether it has no answer, and gets none."""
        is_ended = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return is_ended or self.task.cancelling() > 0


class GatewaySession:
    """A trajectory: its conversations, its requests, and what was seen of them."""

    def __init__(self, key: str, parts: GatewayParts, limits: Limits, channel: Channel) -> None:
        self.limits = limits
        self.notes = SessionNotes()
        self._key = key
        self._parts = parts
        self._channel = channel
        settings = parts.settings
        # made in the thread, since it looks at the chat template
        of_template = settings.history, settings.template_kwargs, settings.apply_chat_template
        self._conversations = parts.texts.submit(Conversations, parts.tokenizer, limits, *of_template)
        self._num_asked = 0  # turns
        self._num_turns = 0  # answers, with those under way
        self._is_closed = False
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._num_waiting = 0
        self._holders: set[asyncio.Task] = set()  # connections with a slot
        self._requests: list[_Request] = []  # those under way, and the last that have ended
        self._told: asyncio.Task | None = None

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
        answered lately.

        Without a reader for `retry_wait_s` it is cancelled; sooner if many have none.

        body: its hash.
        """
        self.check_open()
        request = next((each for each in reversed(self._requests) if each.body == body), None)
        if request is None or not is_retry or request.has_failed:
            request = _Request(body, asyncio.create_task(start()))
            request.task.add_done_callback(self._drop_old)
            self._requests.append(request)
        elif request.expiry is not None:
            request.expiry.cancel()
        request.num_readers += 1
        try:
            yield request.task
        finally:
            request.num_readers -= 1
            if not request.num_readers and not request.task.done():
                wait_s = self._parts.settings.retry_wait_s
                request.expiry = asyncio.get_running_loop().call_later(wait_s, request.task.cancel)
                orphans = [each for each in self._under_way() if not each.num_readers and not each.task.cancelling()]
                if len(orphans) > MAX_IN_FLIGHT:
                    orphans[0].task.cancel()

    def _under_way(self) -> list[_Request]:
        return [each for each in self._requests if not each.task.done()]

    def _drop_old(self, _: asyncio.Task) -> None:
        """Forget failed requests, which hold all that they came of, and old answers."""
        kept = [each for each in self._requests if not each.has_failed]
        old = [each for each in kept if each.task.done()][:-MAX_IN_FLIGHT]
        self._requests = [each for each in kept if each not in old]

    def check_open(self) -> None:
        """Raise TurnRefused after the trajectory's end."""
        if self._is_closed:
            raise key_closed()

    async def end(self) -> SessionNotes:
        """Take no further request, end those under way, and return the notes."""
        self._is_closed = True
        for request in self._under_way():
            request.task.cancel()
        if self._holders:
            _, late = await asyncio.wait(self._holders, timeout=_END_S)
            for holder in late:  # a client that does not read, or does not end its body
                holder.cancel()
        if self._conversations.done():
            self.notes.counts["retokenized"] = self._conversations.result().num_retokenized
        return self.notes

    def add(self, name: str) -> None:
        """Count something of `COUNTS`."""
        self.notes.counts[name] = self.notes.counts.get(name, 0) + 1

    def note_refusal(self, refused: TurnRefused, is_turn: bool) -> None:
        """Note a request that got an error; tell the controller of limits that end a trajectory."""
        if self._is_closed:
            return
        self.add("refused")
        if is_turn:
            self.notes.refusal = refused.code
        if refused.code in _ENDING_LIMITS and self._told is None:
            self._told = asyncio.create_task(self._ask("limit", code=refused.code))

    def note_delivery(self, reply: Reply) -> None:
        """Note that a client has been written a whole answer."""
        self.notes.delivered |= {choice.answer.node for choice in reply.choices}
        self.notes.refusal = None

    def post(self, outcome: dict[str, Any]) -> None:
        """Take the agent's outcome. Raises TurnRefused."""
        try:
            self.notes.posted = outcome_of(outcome)
        except ValueError as error:
            raise TurnRefused(400, "invalid_value", str(error)) from None

    async def num_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens that the model would read. Raises TurnRefused."""
        return await self._in_thread(Conversations.num_tokens, request.messages, request.tools)

    async def answer(self, request: ModelRequest) -> Reply:
        """Return the answers to a request. Raises TurnRefused, ChannelClosed."""
        if self._num_turns + request.num_choices > self.limits.max_turns:
            raise TurnRefused(403, "max_turns", f"The trajectory has had its {self.limits.max_turns} turns.")
        self._num_turns += request.num_choices
        placing = self._submit(partial(_placed, request, self.limits))
        try:
            place = await asyncio.wrap_future(placing)
            room = min(place.room, request.max_tokens or place.room)
            turn = Turn(self._num_asked, place.parent, place.suffix, room, request.num_choices, request.stop)
            self._num_asked += 1
            answers = [Answer(**fields) for fields in await self._ask("turn", turn=turn)]
            choices = [await self._shown(place, request, answer) for answer in answers]
        except BaseException:
            self._num_turns -= request.num_choices
            placing.add_done_callback(self._forget)
            raise
        identity, created = secrets.token_hex(12), int(time.time())
        return Reply(identity, request.model, created, choices, place.num_prompt, place.num_cached)

    def _forget(self, placing: "Future[TurnPlace]") -> None:
        """Drop the place of a request that gets no answer."""
        if not placing.cancelled() and placing.exception() is None:
            self._submit(Conversations.drop, placing.result())

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._submit(work, *arguments))

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        """Begin a method of the conversations."""
        return self._parts.texts.submit(lambda: work(self._conversations.result(), *arguments))

    async def _shown(self, place: TurnPlace, request: ModelRequest, answer: Answer) -> Choice:
        """Add a node for an answer; return the answer as its client is shown it."""
        if request.ids is not None:
            await self._in_thread(Conversations.add, place, answer, None)
            return Choice(answer, {}, answer.finish_reason)
        text = await self._in_thread(Conversations.read, place, answer.tokens, request.stop)
        parsers = self._parts.tool_parser, self._parts.reasoning_parser
        shown = await parsed(text, request.tools, self._parse, *parsers)
        if shown.is_ill_formed:
            self.add("ill_formed")
        message: dict[str, Any] = {"role": "assistant", "content": shown.content}
        if shown.reasoning:
            message["reasoning_content"] = shown.reasoning
        if shown.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{answer.node}_{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": words},
                }
                for index, (name, words) in enumerate(shown.tool_calls)
            ]
        await self._in_thread(Conversations.add, place, answer, message)
        is_call = shown.tool_calls and answer.finish_reason == "stop"
        decode = self._parts.tokenizer.decode
        names = [decode([token], skip_special_tokens=False) for token in answer.tokens if request.wants_log_probs]
        return Choice(answer, message, "tool_calls" if is_call else answer.finish_reason, text.stop, names)

    async def _parse(self, route: str, fields: dict[str, Any]) -> Any:
        try:
            return await self._ask("parse", route=route, fields=fields)
        except TurnRefused as error:
            if error.status != 400:
                raise
            raise ValueError(str(error)) from error

    async def _ask(self, name: str, **fields: Any) -> Any:
        return await self._channel.ask(name, {"session": self._key, **fields})


def key_closed() -> TurnRefused:
    """Return the refusal after a trajectory's end."""
    return TurnRefused(403, "key_closed", "The trajectory of this key has ended.")


def _placed(request: ModelRequest, limits: Limits, conversations: Conversations) -> TurnPlace:
    if request.ids is not None:
        return conversations.place_tokens(request.ids)
    most = limits.max_prompt_tokens + limits.max_response_tokens
    if len(request.messages) > most:  # no template shows a message without a token
        words = f"This model's maximum context length is {most} tokens, fewer than there are messages."
        raise TurnRefused(400, "context_length_exceeded", words)
    return conversations.place(request.messages, request.tools, request.num_choices)
