"""The conversations of one trajectory: finds the place of a request among the answers so far.

An answer is a node. Its tokens are the model's own, behind those of its request, and are never made
of text again.

Messages are hashed by role, text and calls: clients send the same one with other white space in
JSON, with null for an empty text, with text in parts, and with fields of their own.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_dapo.agents.template_probe import arguments_are_text, call_id, ids_are_short
from megatron_dapo.agents.turns import Answer, Limits, TurnRefused
from megatron_dapo.common.bounded import MAX_DEPTH, depth_of, parse_json
from megatron_dapo.data.chat_messages import Messages
from megatron_dapo.data.chat_template import Variables
from megatron_dapo.data.token_arrays import TOKEN, TokenIds, joined, token_array
from megatron_dapo.data.tokenizer import ASSISTANT, Tokenizer

_OPENING_TOKENS = 16  # of a prompt's end, to see whether it opens the model's thoughts
Message = dict[str, Any]


@dataclass(frozen=True, eq=False)
class TurnPlace:
    """The place of a request in a trajectory."""

    parent: int | None  # the node before; None: `suffix` is a whole prompt
    suffix: np.ndarray  # [L], tokens read since the parent's last
    room: int  # most tokens of an answer
    num_root: int  # tokens of the branch's first prompt
    num_cached: int  # tokens up to the parent's last
    digest: bytes | None  # of the messages; None for a request in tokens
    num_answers: int
    nodes: set[int] = field(default_factory=set)  # its answers

    @property
    def num_prompt(self) -> int:
        """Return the number of tokens that the model reads."""
        return self.num_cached + len(self.suffix)


class AnswerText(NamedTuple):
    """The text of an answer, with special tokens."""

    opening: str  # the end of its prompt
    words: str  # up to the stop string
    end: str  # the end-of-turn token, if the model wrote it
    stop: str | None  # the string that ended it


@dataclass(frozen=True, eq=False)
class _Node:
    number: int
    place: TurnPlace
    segment: np.ndarray  # tokens behind the parent's last, with the answer's
    num_tokens: int  # of the branch up to here
    last_token: int | None  # None: the answer is empty
    reasoning: str | None
    call_ids: set[str]  # of the branch up to here


class Conversations:
    """Finds places, and takes in answers, of one trajectory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        history: Literal["tokens", "rendered"],
        template_kwargs: Variables,
        apply_chat_template: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._history = history
        self._template_kwargs = template_kwargs
        self._has_template = apply_chat_template
        self._nodes: dict[int, _Node] = {}  # parents before their children
        self._by_digest: dict[bytes, list[_Node]] = defaultdict(list)
        self._places: list[TurnPlace] = []
        self.num_retokenized = 0
        """Answers that decoding and encoding would have changed."""

    def place(self, messages: Messages, tools: Messages | None, num_answers: int = 1) -> TurnPlace:
        """Return the place of a request: behind an answer, or as a new branch.

        messages, tools: OpenAI's, checked; the last message is not the assistant's.

        Raises TurnRefused: 403 at the limit of branches, 400 without room, and for messages that
        the chat template refuses or leaves out.
        """
        node, suffix, of = self._found(messages, tools)
        return self._placed(node, suffix, of, num_answers)

    def place_tokens(self, ids: Sequence[int]) -> TurnPlace:
        """Return the place of a prompt in tokens: behind the node whose tokens begin it.

        Raises TurnRefused as `place`.
        """
        try:
            tokens = token_array(ids, TOKEN, "token id")
            if not len(tokens) or tokens.min() < 0 or tokens.max() >= self._tokenizer.num_tokens:
                raise ValueError(f"must have tokens, from 0 to {self._tokenizer.num_tokens - 1}")
        except ValueError as error:
            raise TurnRefused(400, "invalid_value", f"The prompt {error}.") from error
        return self._placed(*self._split(tokens), None, 1)

    def num_tokens(self, messages: Messages, tools: Messages | None) -> int:
        """Return the number of tokens that the model would read. Raises as `place`, but for limits."""
        node, suffix, _ = self._found(messages, tools)
        return (node.num_tokens if node else 0) + len(suffix)

    def read(self, place: TurnPlace, tokens: TokenIds, stop: Sequence[str] = ()) -> AnswerText:
        """Return the text of an answer, up to the first of the stop strings."""
        size = len(tokens) - int(len(tokens) > 0 and tokens[-1] in self._tokenizer.eos_token_ids)
        words = self._text(tokens[:size])
        at, ended_by = min(((words.index(text), text) for text in stop if text in words), default=(None, None))
        return AnswerText(self._text(place.suffix[-_OPENING_TOKENS:]), words[:at], self._text(tokens[size:]), ended_by)

    def add(self, place: TurnPlace, answer: Answer, message: Message | None) -> None:
        """Take in an answer.

        message: the assistant's, as the client was shown it; None for a request in tokens.
        """
        parent = None if place.parent is None else self._nodes[place.parent]
        segment = joined(TOKEN, place.suffix, answer.tokens)
        self._nodes[answer.node] = node = _Node(
            number=answer.node,
            place=place,
            segment=segment,
            num_tokens=place.num_cached + len(segment),
            last_token=int(segment[-1]) if len(answer.tokens) else None,
            reasoning=(message or {}).get("reasoning_content"),
            call_ids=(parent.call_ids if parent else set()) | _call_ids(message or {}),
        )
        place.nodes.add(answer.node)
        if place.digest is not None and message is not None:
            self._by_digest[_message_digest(place.digest, message)].append(node)
        try:
            self.num_retokenized += self._tokenizer.encode(self._text(answer.tokens)) != list(answer.tokens)
        except ValueError:  # no token stands for a part of it
            self.num_retokenized += 1

    def drop(self, place: TurnPlace) -> None:
        """Forget a request that got no answer: it is no branch."""
        self._places.remove(place)

    def _found(self, messages: Messages, tools: Messages | None) -> tuple[_Node | None, np.ndarray, bytes]:
        """Return the node before a request, the tokens behind it, and the messages' hash."""
        variables = {**self._template_kwargs, "tools": tools}
        try:
            if depth_of(tools) > MAX_DEPTH:
                raise ValueError(f"tools are nested more than {MAX_DEPTH} deep")
            digests = [_digest(b"", list(tools or ()))]
            for message in messages:
                digests.append(_message_digest(digests[-1], message))
            behind = self._appended(messages, digests, variables) if self._history == "tokens" else None
            node, suffix = behind or self._split(np.array(self._rendered(messages, variables), TOKEN))
        except ValueError as error:
            raise TurnRefused(400, "invalid_value", f"The messages are refused: {error}.") from error
        return node, suffix, digests[-1]

    def _appended(
        self, messages: Messages, digests: list[bytes], variables: Variables
    ) -> tuple[_Node, np.ndarray] | None:
        """Return the node before the last messages and their tokens; None if there is none, or they
        cannot stand behind it."""
        size = next((size for size in range(len(messages) - 1, 0, -1) if digests[size] in self._by_digest), 0)
        if not size or any(message["role"] == ASSISTANT for message in messages[size:]):
            return None
        # of several the one with the calls or thoughts that the client tells
        echoed = {name for message in messages[:size] for name in _call_ids(message)}
        thoughts = messages[size - 1].get("reasoning_content")
        nodes = self._by_digest[digests[size]]
        node = max(nodes, key=lambda n: (len(n.call_ids & echoed), n.reasoning == thoughts, n.number))
        said, *rest = self._shown(messages, size - 1)
        calls = _calls_of(said)
        try:
            turn = self._tokenizer.encode_turn(rest, node.last_token, self._has_template, variables, calls)
        except ValueError:
            return None
        return node, np.array(turn, TOKEN)

    def _rendered(self, messages: Messages, variables: Variables) -> TokenIds:
        """Return the tokens of a whole prompt. Raises ValueError if they tell the model less."""
        shown = self._shown(messages)
        text = self._tokenizer.full_text(shown, variables) if self._has_template else ""
        for kind, functions in (
            ("tool", variables["tools"] or ()),
            ("call", [call for message in shown for call in _calls_of(message)]),
        ):
            if hidden := [row["function"]["name"] for row in functions if row["function"]["name"] not in text]:
                raise ValueError(f"the model's chat template shows no {kind} of {hidden[0]!r:.100}")
        return self._tokenizer.encode(text) if self._has_template else self._tokenizer.encode_prompt(shown, False)[0]

    def _split(self, ids: np.ndarray) -> tuple[_Node | None, np.ndarray]:
        """Return the longest branch whose tokens begin a prompt, and the prompt's tokens behind."""
        ends: dict[int | None, int] = {None: 0}  # of the branches that begin it
        best: _Node | None = None
        for node in self._nodes.values():
            start = ends.get(node.place.parent)
            if start is not None and np.array_equal(ids[start : node.num_tokens], node.segment):
                ends[node.number] = node.num_tokens
                is_longest = best is None or node.num_tokens >= best.num_tokens
                best = node if is_longest and node.last_token is not None else best
        return best, ids[best.num_tokens if best else 0 :]

    def _placed(self, node: _Node | None, suffix: np.ndarray, of: bytes | None, num_answers: int) -> TurnPlace:
        limits = self._limits
        num_cached, num_root = (node.num_tokens, node.place.num_root) if node else (0, len(suffix))
        num_prompt = num_cached + len(suffix)
        most = num_root + limits.max_response_tokens if node else limits.max_prompt_tokens
        room = num_root + limits.max_response_tokens - num_prompt
        if room <= 0 or num_prompt > most:
            words = f"This model's maximum context length is {most} tokens. However, your messages resulted in "
            words += f"{num_prompt} tokens. Please reduce the length of the messages."
            raise TurnRefused(400, "context_length_exceeded", words)
        room = min(room, limits.max_tokens_per_turn or room)
        place = TurnPlace(node.number if node else None, suffix, room, num_root, num_cached, of, num_answers)
        if _num_branches([*self._places, place]) > limits.max_branches:
            raise TurnRefused(403, "max_branches", f"The trajectory has had its {limits.max_branches} branches.")
        self._places.append(place)
        return place

    @cached_property  # the template is only used in the thread of requests
    def _arguments_are_text(self) -> bool:
        return self._has_template and bool(arguments_are_text(self._tokenizer, self._template_kwargs))

    @cached_property
    def _ids_are_short(self) -> bool:
        return self._has_template and ids_are_short(self._tokenizer, self._template_kwargs, self._arguments_are_text)

    def _shown(self, messages: Messages, start: int = 0) -> list[Message]:
        """Return the messages from a place on for the chat template."""
        ids: dict[str, str] = {}  # of calls, as the template takes them
        numbers = count()
        shown = []
        for place, message in enumerate(messages):
            for call in () if self._ids_are_short else _calls_of(message):
                ids[call["id"]] = call_id(call["function"]["name"], next(numbers))
            if place >= start:
                shown.append(_template_message(message, self._arguments_are_text, ids))
        return shown

    def _text(self, tokens: TokenIds) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _num_branches(places: list[TurnPlace]) -> int:
    """Return the number of rows for the trainer.

    Of the same request asked again the last one counts, and those with further turns behind them.
    """
    parents = {place.parent for place in places}
    last = {(place.parent, place.suffix.tobytes()): place for place in places}.values()
    return sum(
        place.num_answers - len(parents & place.nodes) for place in places if parents & place.nodes or place in last
    )


def _digest(before: bytes, value: Any) -> bytes:
    """Return the hash of a JSON value behind others."""
    return hashlib.sha256(before + json.dumps(_plain(value), sort_keys=True).encode()).digest()


def _message_digest(before: bytes, message: Message) -> bytes:
    """Return the hash of a conversation with one message more: of its role, text and calls."""
    calls = [[call["function"]["name"], _value(call["function"]["arguments"])] for call in _calls_of(message)]
    return _digest(before, [message["role"], _content(message), calls])


def _calls_of(message: Message) -> list[Message]:
    return message.get("tool_calls") or []


def _call_ids(message: Message) -> set[str]:
    return {call["id"] for call in _calls_of(message)}


def _template_message(message: Message, arguments_are_text: bool, ids: dict[str, str]) -> Message:
    """Return a message for a chat template.

    arguments_are_text: it reads a call's arguments as JSON text, else as an object.
    ids: those of calls, as it takes them; others are made short.
    """
    shown = {**message, "content": _content(message)}
    if thoughts := shown.get("reasoning_content"):
        if not (_calls_of(message) and shown["content"]):  # which gpt-oss' template refuses together
            shown["thinking"] = thoughts
    if "tool_call_id" in shown:
        name = shown["tool_call_id"]
        shown["tool_call_id"] = ids.get(name) or _short(name)
    shown_as = str if arguments_are_text else _value
    if "tool_calls" in shown:
        shown["tool_calls"] = [
            {
                **call,
                "id": ids.get(call["id"]) or _short(call["id"]),
                "function": {**function, "arguments": shown_as(function["arguments"])},
            }
            for call in _calls_of(message)
            for function in [call["function"]]
        ]
    return shown


def _content(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _value(arguments: str) -> Any:
    """Return the JSON value of a call's arguments; a text that is no JSON as it is."""
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return arguments


def _short(name: str) -> str:
    """Return the id of a call as Mistral's templates require it, 9 letters and digits."""
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as such: JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
