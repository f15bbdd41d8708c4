"""The order of the drawn prompts: by epochs, by the weights of several files, or by difficulty."""

import hashlib
import random
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import Any, Protocol, TypeVar

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.own_order import KEY, OwnOrder
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.samples import Prompt

Item = TypeVar("Item")

_CANNOT_GO_ON = (
    "the order of prompts cannot be continued: restore it, or begin it anew with trainer.accept_missing=[controller]."
)
_UNKNOWN_RATE = 0.5  # of a prompt without a measured pass rate


class Cursor(Protocol):
    """A source of prompt numbers with a state to save."""

    def next(self, count: int) -> list[int]:
        """Return the next `count` numbers."""
        ...

    def note_rate(self, number: int, rate: float) -> None:
        """Take in the share of right responses to a prompt."""
        ...

    def passes(self) -> dict[str, float]:
        """Return the passes over the prompts as "epoch", over a mixture's files as "FILE/epoch"."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor. Raises UserError, before any change, for an unfit one."""
        ...


class PromptCursor:
    """Prompt numbers, drawn epoch by epoch, every prompt once per epoch.

    The order is fixed by (seed, epoch), and by the difficulties or the measured pass rates: easy
    ones first. A prompt that was always or never solved will probably be so again, and its
    responses say nothing. By measured rates such prompts do not come all together, but spread among
    the others.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        content: str = "",
        difficulties: Sequence[float] = (),
        is_measured: bool = False,
    ) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            num_prompts: numbers are below it.
            seed, shuffle: the order of an epoch; without shuffle that of the numbers.
            content: a hash of the prompts, see `content_of`; it serves only to be compared.
            difficulties: of each prompt; an epoch then goes from the lowest to the highest.
            is_measured: from the second epoch on the prompts with the highest noted rates come
                first, but for those of 1 and 0.
        """
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._difficulties = difficulties
        self._is_measured = is_measured
        self._rates: dict[int, float] = {}
        curriculum = "measured" if is_measured else _digest(difficulties) if difficulties else "none"
        self._identity = {
            "num_prompts": num_prompts,
            "seed": seed,
            "shuffle": shuffle,
            "content": content,
            "curriculum": curriculum,
        }
        self._epoch = 0
        self._position = 0
        # of the epoch; made with its first draw, when the rates of the last one are known
        self._order: list[int] = []

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs."""
        return self._epoch

    def passes(self) -> dict[str, float]:
        """Return the number of epochs, with the finished part of the current one."""
        return {"epoch": self._epoch + self._position / self._num_prompts}

    def next(self, count: int) -> list[int]:
        """Return the next `count` numbers in [0, num_prompts), on into the next epoch if needed."""
        drawn: list[int] = []
        while len(drawn) < count:
            self._order = self._order or self._order_of(self._epoch)
            part = self._order[self._position : self._position + count - len(drawn)]
            drawn += part
            self._position += len(part)
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = []
        return drawn

    def note_rate(self, number: int, rate: float) -> None:
        """Take in the share of right responses to a prompt."""
        if self._is_measured:
            self._rates[number] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        state = {**self._identity, "epoch": self._epoch, "position": self._position}
        if not self._is_measured:
            return state
        return {**state, "order": list(self._order), "rates": [[number, rate] for number, rate in self._rates.items()]}

    def check(self, state: dict[str, Any]) -> None:
        """Raise UserError if a saved cursor drew from other data, or in another order."""
        words = {
            "num_prompts": "the number of prompts",
            "seed": "data.seed",
            "shuffle": "data.shuffle",
            "content": "the content of the prompts, as a hash,",
            "curriculum": "data.curriculum, or the difficulties as a hash,",
        }
        if "own_order" in state:
            raise UserError(f"{KEY} was {state['own_order']} when the checkpoint was written; {_CANNOT_GO_ON}")
        if "mixture" in state:
            raise UserError(f"data.mixture was set when the checkpoint was written and is empty now; {_CANNOT_GO_ON}")
        changed = [
            f"{words[name]} was {state[name]} when the checkpoint was written and is {value} now; {_CANNOT_GO_ON}"
            for name, value in self._identity.items()
            if state[name] != value
        ]
        if changed:
            raise UserError(changed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor. Raises UserError as `check`, before any change."""
        self.check(state)
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._rates = {number: rate for number, rate in state.get("rates", ())}
        self._order = list(state.get("order", ()))

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_prompts))
        assert order, "a data set has prompts"
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        if self._difficulties:
            order.sort(key=self._difficulties.__getitem__)
        elif self._is_measured and epoch:
            rates = [self._rates.get(number, _UNKNOWN_RATE) for number in range(self._num_prompts)]
            telling = sorted((number for number in order if 0 < rates[number] < 1), key=lambda number: -rates[number])
            return spread([number for number in order if not 0 < rates[number] < 1], telling)
        return order


def spread(some: Sequence[Item], others: Sequence[Item]) -> list[Item]:
    """Return all in their orders, with some put among the others at equal distances."""
    size = len(some) + len(others)
    merged: list[Item] = []
    num_taken = 0
    for position in range(1, size + 1):
        if position * len(some) // size > num_taken:
            merged.append(some[num_taken])
            num_taken += 1
        else:
            merged.append(others[position - 1 - num_taken])
    return merged


class MixtureCursor:
    """Prompt numbers of several files, each of the file furthest behind its share of the draws."""

    def __init__(
        self, parts: Sequence[PromptCursor], sizes: Sequence[int], weights: Sequence[float], names: Sequence[str] = ()
    ) -> None:
        """Start at the first prompt of each file.

        Args:
            parts: the cursor of each file; its numbers begin at 0.
            sizes: prompts of each file; numbers go on from one file to the next.
            weights: of each file, above 0.
            names: of the files, for `passes`; without any, their numbers from 0.
        """
        self._names = names or [str(number) for number in range(len(parts))]
        self._parts = list(parts)
        self._starts = [0, *accumulate(sizes)][:-1]
        self._weights = [weight / sum(weights) for weight in weights]
        self._num_drawn = [0] * len(self._parts)

    def next(self, count: int) -> list[int]:
        """Return the next `count` numbers."""
        drawn = []
        for _ in range(count):
            num_next = sum(self._num_drawn) + 1
            behind = [weight * num_next - num for weight, num in zip(self._weights, self._num_drawn, strict=True)]
            file = behind.index(max(behind))
            self._num_drawn[file] += 1
            drawn.append(self._starts[file] + self._parts[file].next(1)[0])
        return drawn

    def passes(self) -> dict[str, float]:
        """Return the number of epochs of each file, with the finished part of the current one."""
        files = zip(self._names, self._parts, strict=True)
        return {f"{name}/epoch": part.passes()["epoch"] for name, part in files}

    def note_rate(self, number: int, rate: float) -> None:
        """Take in the share of right responses to a prompt."""
        file = max(place for place, start in enumerate(self._starts) if start <= number)
        self._parts[file].note_rate(number - self._starts[file], rate)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "mixture": [round(weight, 12) for weight in self._weights],
            "num_drawn": list(self._num_drawn),
            "parts": [part.state_dict() for part in self._parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor.

        Raises UserError, before any change, for other data or other weights.
        """
        saved = state.get("mixture")
        if saved != self.state_dict()["mixture"]:
            raise UserError(
                f"data.mixture was {saved or 'empty'} (as shares) when the checkpoint was written; {_CANNOT_GO_ON}"
            )
        pairs = list(zip(self._parts, state["parts"], strict=True))
        for part, part_state in pairs:
            part.check(part_state)
        for part, part_state in pairs:
            part.load_state_dict(part_state)
        self._num_drawn = list(state["num_drawn"])


def content_of(prompts: Iterable[Prompt]) -> str:
    """Return a hash of all prompts, in their order."""
    return hashlib.sha256("".join(prompt.key for prompt in prompts).encode()).hexdigest()[:16]


def _digest(difficulties: Sequence[float]) -> str:
    return hashlib.sha256(repr(tuple(difficulties)).encode()).hexdigest()[:16]


def make_cursor(data: DataConfig, dataset: PromptDataset) -> Cursor:
    """Return the cursor of the training files.

    Raises UserError for a file of a mixture without prompts, and for a class of the user's own.
    """
    prompts = dataset.prompts
    if ":" in data.curriculum:
        return OwnOrder(data.curriculum, prompts, data.seed, content_of(prompts))
    sizes = [file.num_kept for file in dataset.report] if data.mixture else [len(prompts)]
    for file in dataset.report if data.mixture else ():
        if not file.num_kept:
            raise UserError(f"{file.path} has no prompts for data.mixture ({file}); leave it out, or correct it.")
    parts = []
    start = 0
    for size in sizes:
        own = slice(start, start + size)
        start += size
        difficulties = dataset.difficulties[own]
        is_measured = data.curriculum == "measured"
        content = content_of(prompts[own])
        parts.append(PromptCursor(size, data.seed, data.shuffle, content, difficulties, is_measured))
    return MixtureCursor(parts, sizes, data.mixture, short_names(data.train_files)) if data.mixture else parts[0]


def short_names(paths: Sequence[str]) -> list[str]:
    """Return each file's name without the ending.

    Files of the same name get the fewest folders that tell them apart, joined by dots. The same
    file named twice gets its place.
    """
    parts = [[*(part.strip("/") for part in PurePath(path).parts[:-1]), PurePath(path).stem] for path in paths]
    names = [".".join(own[-_num_parts(own, parts) :]) for own in parts]
    return [name if names.count(name) == 1 else f"{name}.{place}" for place, name in enumerate(names)]


def _num_parts(own: list[str], parts: list[list[str]]) -> int:
    """Return the number of last parts of a path that tell it apart from the others."""
    for num in range(1, len(own)):
        if [other[-num:] for other in parts].count(own[-num:]) == 1:
            return num
    return len(own)
