"""The forest of one trajectory: its answers with their tokens, and the branches to train on. Pure."""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dapo.common.seeds import seed_from
from megatron_dapo.data.samples import Branch
from megatron_dapo.data.token_arrays import LOG_PROB, MASK, TOKEN, VERSION, TokenIds, joined, repeated
from megatron_dapo.servers.client import Generation


@dataclass(frozen=True, eq=False)
class Node:
    """One answer, and what the model has read before it."""

    parent: int | None
    suffix: np.ndarray  # [L]: read since the parent's last token; a root's is its whole prompt
    generation: Generation  # its routed experts begin where the parent's end
    seed: int
    request: int
    choice: int  # among the answers to the request


class Forest:
    """The answers of a trajectory, by their numbers."""

    def __init__(self, *seeds: int | str) -> None:
        """Begin without answers. seeds: of the trajectory; those of the answers derive from them."""
        self.nodes: list[Node] = []
        self._seed = seed_from(*seeds)
        self._num_asked: Counter[tuple[int, bytes]] = Counter()

    def next_seed(self, parent: int | None, suffix: TokenIds) -> int:
        """Return the seed of another answer to the same tokens.

        It follows from the path, its tokens, and its place among equal questions, not from the
        order in which different ones arrive.
        """
        before = self._seed if parent is None else self.nodes[parent].seed
        content = hashlib.blake2b(np.asarray(suffix, TOKEN).tobytes(), digest_size=16).digest()
        place = self._num_asked[before, content]
        self._num_asked[before, content] += 1
        return seed_from(before, content.hex(), place)

    def num_tokens(self, numbers: Iterable[int] | None = None) -> int:
        """Return the number of tokens written, in all answers or in these."""
        nodes = self.nodes if numbers is None else [self.nodes[number] for number in numbers]
        return sum(len(node.generation.tokens) for node in nodes)

    def add(self, node: Node) -> int:
        """Add an answer and return its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def path(self, number: int | None) -> list[int]:
        """Return the numbers from the root to an answer; [] for None."""
        numbers = []
        while number is not None:
            numbers.append(number)
            number = self.nodes[number].parent
        return numbers[::-1]

    def tokens(self, number: int | None) -> np.ndarray:
        """Return the tokens of prompt and response up to an answer's last, [L]."""
        nodes = [self.nodes[each] for each in self.path(number)]
        return joined(TOKEN, *(part for node in nodes for part in (node.suffix, node.generation.tokens)))

    def kept(self, delivered: Iterable[int]) -> tuple[list[int], dict[str, int]]:
        """Return the answers to train on, in their order, and the tokens left out, by their reason.

        tokens_undelivered: no client read the answer to its end. An answer with one behind it was
        read, whatever became of its delivery. tokens_twins: the same was asked again; only the last
        answers count, and those that the agent went on from.
        """
        read = {number: self.nodes[number] for end in delivered for number in self.path(end)}
        last: dict[tuple[int | None, bytes], int] = {}  # question -> the last request with it
        for node in read.values():
            question = node.parent, node.suffix.tobytes()
            last[question] = max(last.get(question, 0), node.request)
        requests, parents = {*last.values()}, {node.parent for node in read.values()}
        used = [number for number, node in read.items() if node.request in requests or number in parents]
        num_read, num_used = self.num_tokens(read), self.num_tokens(used)
        left_out = {"tokens_undelivered": self.num_tokens() - num_read, "tokens_twins": num_read - num_used}
        return sorted(used, key=self._place), left_out

    def branches(self, kept: Collection[int]) -> list[Branch]:
        """Return the paths from a root to each last answer of `kept`, in the order of these.

        An answer in several of them counts in the earliest.
        """
        leaves = {*kept} - {self.nodes[number].parent for number in kept}
        counted: set[int] = set()
        branches = []
        for leaf in sorted(leaves, key=self._place):
            path = self.path(leaf)
            branches.append(self._branch(path, counted))
            counted.update(path)
        return branches

    def _branch(self, path: list[int], counted: Collection[int]) -> Branch:
        parts: list[tuple[np.ndarray, ...]] = []
        version = 0  # tokens that are read have that of the answer before
        for number in path:
            node = self.nodes[number]
            written = node.generation
            read = node.suffix[: 0 if node.parent is None else None]
            mask = repeated(number not in counted, len(written.tokens), MASK)
            zeros = np.zeros_like(read)
            parts.append((read, zeros, zeros, repeated(version, len(read), VERSION)))
            parts.append((written.tokens, written.log_probs, mask, written.weight_versions))
            version = written.weight_versions[-1] if len(written.weight_versions) else version
        tokens, log_probs, masks, versions = zip(*parts, strict=True)
        return Branch(
            prompt_tokens=self.nodes[path[0]].suffix,
            response_tokens=joined(TOKEN, *tokens),
            rollout_log_probs=joined(LOG_PROB, *log_probs),
            loss_mask=joined(MASK, *masks),
            weight_versions=joined(VERSION, *versions),
            routed_experts=np.concatenate([self.nodes[number].generation.routed_experts for number in path]),
        )

    def _place(self, number: int) -> tuple[int, int]:
        """Return an answer's place in the trajectory, which no server's speed changes."""
        return self.nodes[number].request, self.nodes[number].choice


def up_to_stop(generation: Generation, stop: Sequence[str], num_read: int, decode: Callable[..., str]) -> Generation:
    """Return an answer of several servers up to its first stop text: each looked only in its own part.

    num_read: tokens before it with routed experts in it.
    """

    def has_stop(length: int) -> bool:
        text = decode(generation.tokens[:length], skip_special_tokens=False)
        return any(each in text for each in stop)

    whole = len(generation.tokens)
    length = bisect_left(range(whole), True, key=has_stop)
    if length == whole:
        return generation
    per_token = len(generation.routed_experts) // (num_read + whole - 1)
    arrays = {name: getattr(generation, name)[:length] for name in ("tokens", "log_probs", "weight_versions")}
    experts = generation.routed_experts[: per_token * (num_read + length - 1)]
    return replace(generation, **arrays, finish_reason="stop", routed_experts=experts)
