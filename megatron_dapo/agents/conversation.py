"""The conversations of one trajectory: finds the place of a request among the answers so far.

An answer is a node. Its tokens are the model's own, behind those of its request, and are never
made of text again.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron_dapo.agents.canonical import call_ids, digest, message_digest, reasoning_of, role_of
from megatron_dapo.agents.prompt_writer import AnswerText, PromptWriter
from megatron_dapo.agents.turns import Answer, Limits, TurnRefused
from megatron_dapo.data.token_arrays import TOKEN, joined, token_array
from megatron_dapo.data.tokenizer import ASSISTANT

Message = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a request in a trajectory."""

    request: int  # its number in the trajectory
    parent: int | None  # the node before; None: `suffix` is a whole prompt
    suffix: np.ndarray  # [L], tokens read since the parent's last
    room: int  # most tokens of an answer
    digest: bytes | None  # of the messages; None for a request in tokens


@dataclass(frozen=True, eq=False)
class _Node:
    number: int
    parent: int | None
    segment: np.ndarray  # tokens behind the parent's last, with the answer's
    num_tokens: int  # of the branch up to here
    num_root: int  # of the branch's whole prompt
    last_token: int | None
    reasoning: str
    call_ids: frozenset[str]  # of the branch up to here


@dataclass(frozen=True, eq=False)
class _Request:
    parent: int | None
    suffix: bytes
    num_answers: int
    nodes: set[int] = field(default_factory=set)


class Conversations:
    """Finds places, and takes in answers, of one trajectory."""

    def __init__(self, writer: PromptWriter, limits: Limits, history: Literal["tokens", "rendered"]) -> None:
        self._writer = writer
        self._limits = limits
        self._history = history
        self._nodes: dict[int, _Node] = {}  # parents before their children
        self._by_digest: dict[bytes, list[_Node]] = defaultdict(list)
        self._requests: list[_Request] = []
        self.num_retokenized = 0
        """Answers that decoding and encoding would have changed."""

    def place(self, messages: Sequence[Message], tools: Sequence[Message] | None, num_answers: int = 1) -> Place:
        """Return the place of a request: behind an answer, or as a new branch.

        Args:
            messages: OpenAI's, of text alone; the last one is not the assistant's.
            tools: OpenAI's.
            num_answers: the client's `n`.

        Raises:
            TurnRefused: 403 for a limit of turns or branches, 400 without room, and for messages
                that the chat template refuses.
        """
        self._check_turns(num_answers)
        try:
            if not messages or role_of(messages[-1]) == ASSISTANT:
                raise ValueError("the last message must be another's than the assistant's")
            digests = [digest(b"", [list(tools or ()), dict(self._writer.template_kwargs)])]
            for message in messages:
                digests.append(message_digest(digests[-1], message))
            found = self._appended(messages, tools, digests) if self._history == "tokens" else None
            node, suffix = found or self._split(np.array(self._writer.prompt(messages, tools), TOKEN))
        except ValueError as error:
            raise TurnRefused(400, "invalid_value", f"{error}.") from error
        return self._placed(node, suffix, digests[-1], num_answers)

    def place_tokens(self, ids: Sequence[int], num_answers: int = 1) -> Place:
        """Return the place of a prompt in tokens: behind the node whose tokens begin it.

        Raises TurnRefused as `place`.
        """
        self._check_turns(num_answers)
        num_tokens = self._writer.tokenizer.num_tokens
        try:
            tokens = token_array(ids, TOKEN, "token id")
        except ValueError as error:
            raise TurnRefused(400, "invalid_value", f"The prompt {error}.") from error
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= num_tokens:
            raise TurnRefused(400, "invalid_value", f"The prompt must have tokens from 0 to {num_tokens - 1}.")
        return self._placed(*self._split(tokens), None, num_answers)

    def read(self, place: Place, answer: Answer, stop: Sequence[str] = ()) -> AnswerText:
        """Return the text of an answer, up to a stop string."""
        return self._writer.read(place.suffix, answer.tokens, stop)

    def add(self, place: Place, answer: Answer, message: Message | None) -> None:
        """Take in an answer.

        message: the assistant's, as the client was shown it; None for a request in tokens.
        """
        parent = None if place.parent is None else self._nodes[place.parent]
        segment = joined(TOKEN, place.suffix, answer.tokens)
        node = _Node(
            number=answer.node,
            parent=place.parent,
            segment=segment,
            num_tokens=(parent.num_tokens if parent else 0) + len(segment),
            num_root=parent.num_root if parent else len(place.suffix),
            last_token=int(segment[-1]) if len(answer.tokens) else None,
            reasoning=reasoning_of(message or {}),
            call_ids=(parent.call_ids if parent else frozenset()) | call_ids(message or {}),
        )
        self._nodes[node.number] = node
        self._requests[place.request].nodes.add(node.number)
        if place.digest is not None and message is not None:
            self._by_digest[message_digest(place.digest, message)].append(node)
        self.num_retokenized += not self._writer.survives_decoding(answer.tokens)

    def _appended(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, digests: list[bytes]
    ) -> tuple[_Node, np.ndarray] | None:
        """Return the node before the last messages and their tokens; None if there is none, or they
        cannot stand behind it."""
        size = next((size for size in range(len(messages) - 1, 0, -1) if digests[size] in self._by_digest), 0)
        rest = messages[size:]
        if not size or any(role_of(message) == ASSISTANT for message in rest):
            return None
        node = self._best(self._by_digest[digests[size]], messages[:size])
        try:
            return node, np.array(self._writer.turn(rest, node.last_token, tools, messages[size - 1]), TOKEN)
        except ValueError:
            return None

    def _best(self, nodes: list[_Node], messages: Sequence[Message]) -> _Node:
        """Return the node that the client means, of several with the same messages."""
        echoed = frozenset().union(*map(call_ids, messages))
        thoughts = reasoning_of(messages[-1])
        return max(nodes, key=lambda n: (len(n.call_ids & echoed), n.reasoning == thoughts, n.number))

    def _split(self, ids: np.ndarray) -> tuple[_Node | None, np.ndarray]:
        """Return the longest branch whose tokens begin a prompt, and the prompt's tokens behind."""
        ends: dict[int | None, int] = {None: 0}  # of the branches that begin it
        best: _Node | None = None
        for node in self._nodes.values():
            start = ends.get(node.parent)
            if start is None or not np.array_equal(ids[start : node.num_tokens], node.segment):
                continue
            ends[node.number] = node.num_tokens
            if best is None or node.num_tokens >= best.num_tokens:
                best = node
        return best, ids[best.num_tokens if best else 0 :]

    def _check_turns(self, num_answers: int) -> None:
        limits = self._limits
        if not 1 <= num_answers <= limits.max_choices:
            raise TurnRefused(400, "invalid_value", f"A request may have 1 to {limits.max_choices} answers.")
        if sum(request.num_answers for request in self._requests) + num_answers > limits.max_turns:
            raise TurnRefused(403, "max_turns", f"The trajectory has had its {limits.max_turns} turns.")

    def _placed(self, node: _Node | None, suffix: np.ndarray, of: bytes | None, num_answers: int) -> Place:
        limits = self._limits
        num_root = node.num_root if node else len(suffix)
        num_tokens = (node.num_tokens if node else 0) + len(suffix)
        most = num_root + limits.max_response_tokens if node else limits.max_prompt_tokens
        room = num_root + limits.max_response_tokens - num_tokens
        if room <= 0 or num_tokens > most:
            raise TurnRefused(
                400,
                "context_length_exceeded",
                f"This model's maximum context length is {most} tokens. However, your messages resulted in "
                f"{num_tokens} tokens. Please reduce the length of the messages.",
            )
        request = _Request(node.number if node else None, suffix.tobytes(), num_answers)
        if _num_branches([*self._requests, request]) > limits.max_branches:
            raise TurnRefused(403, "max_branches", f"The trajectory has had its {limits.max_branches} branches.")
        self._requests.append(request)
        room = min(room, limits.max_tokens_per_turn or room)
        return Place(len(self._requests) - 1, request.parent, suffix, room, of)


def _num_branches(requests: list[_Request]) -> int:
    """Return the number of rows for the trainer: of the same request asked again the last one
    counts, and those that others go on behind."""
    parents = {request.parent for request in requests}
    last = {(request.parent, request.suffix): request for request in requests}
    return sum(
        request.num_answers - len(parents & request.nodes)
        for request in requests
        if parents & request.nodes or last[request.parent, request.suffix] is request
    )
