"""The forest of one trajectory: its answers with their tokens, and the branches to train on. Pure."""

import hashlib
from bisect import bisect_left
from collections import Counter, defaultdict
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

    @property
    def place(self) -> tuple[int, int]:
        """Return its place in the trajectory, which no server's speed changes."""
        return self.request, self.choice


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

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens written."""
        return self._num_tokens(range(len(self.nodes)))

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

    def kept(self, delivered: Collection[int]) -> tuple[list[int], dict[str, int]]:
        """Return the answers to train on, in their order, and the tokens left out, by their reason.

        undelivered: no client read the answer to its end. An answer with one behind it was read,
        whatever became of its delivery. twins: the same was asked again; only the last answers
        count, and those that the agent went on from.
        """
        read = self._with_all_before(delivered)
        askers: dict[tuple[int | None, bytes], dict[int, int]] = defaultdict(dict)  # question -> request -> its last
        for number in read:
            node = self.nodes[number]
            askers[node.parent, node.suffix.tobytes()][node.request] = number
        last = {max(requests) for requests in askers.values()}
        used = self._with_all_before(number for number in read if self.nodes[number].request in last)
        used |= {self.nodes[number].parent for number in read} - {None}  # type: ignore[arg-type]
        ordered = sorted(used, key=lambda number: self.nodes[number].place)
        num_read, num_used = self._num_tokens(read), self._num_tokens(used)
        return ordered, {"undelivered": self.num_tokens - num_read, "twins": num_read - num_used}

    def branches(self, kept: Collection[int]) -> list[Branch]:
        """Return the paths from a root to each last answer of `kept`, in the order of these.

        An answer in several of them counts in the earliest.
        """
        parents = {self.nodes[number].parent for number in kept}
        leaves = sorted({*kept} - parents, key=lambda number: self.nodes[number].place)
        counted: set[int] = set()
        branches = []
        for leaf in leaves:
            path = self.path(leaf)
            branches.append(self._branch(path, counted))
            counted.update(path)
        return branches

    def _branch(self, path: list[int], counted: Collection[int]) -> Branch:
        tokens: list[np.ndarray] = []
        log_probs: list[np.ndarray] = []
        mask: list[np.ndarray] = []
        versions: list[np.ndarray] = []
        version = 0  # tokens that are read have that of the answer before
        for number in path:
            node = self.nodes[number]
            written = node.generation
            num_read = 0 if node.parent is None else len(node.suffix)
            tokens += [node.suffix[:num_read], written.tokens]
            log_probs += [np.zeros(num_read, LOG_PROB), written.log_probs]
            mask += [repeated(0, num_read, MASK), repeated(number not in counted, len(written.tokens), MASK)]
            versions += [repeated(version, num_read, VERSION), written.weight_versions]
            version = written.weight_versions[-1] if len(written.weight_versions) else version
        return Branch(
            prompt_tokens=self.nodes[path[0]].suffix,
            response_tokens=joined(TOKEN, *tokens),
            rollout_log_probs=joined(LOG_PROB, *log_probs),
            loss_mask=joined(MASK, *mask),
            weight_versions=joined(VERSION, *versions),
            routed_experts=np.concatenate([self.nodes[number].generation.routed_experts for number in path]),
        )

    def _with_all_before(self, numbers: Iterable[int]) -> set[int]:
        return {each for number in numbers for each in self.path(number)}

    def _num_tokens(self, numbers: Iterable[int]) -> int:
        return sum(len(self.nodes[number].generation.tokens) for number in numbers)


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
