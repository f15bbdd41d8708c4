"""Common parts of the examples' problems: a fixed split, and the files the trainer reads."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from megatron_dapo.common.files import write_whole


@dataclass(frozen=True)
class Problem:
    """A question about two numbers. A kind of problem has its wording, with {a} and {b}, and its
    solution."""

    wording: ClassVar[str]
    solve: ClassVar[Callable[[int, int], int]]
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return self.wording.format(a=self.a, b=self.b)

    @property
    def answer(self) -> str:
        return str(self.solve(self.a, self.b))


P = TypeVar("P", bound=Problem)


def held_apart(kind: type[P], numbers: Iterable[int], num_held_out: int, seed: int) -> tuple[list[P], list[P]]:
    """Return the problems of all pairs of numbers as (training, held out), shuffled, without a
    common problem."""
    numbers = list(numbers)
    problems = [kind(a, b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(problems)
    return problems[num_held_out:], problems[:num_held_out]


def row(data_source: str, problem: Problem, index: int) -> dict:
    """Return one line of a prompt file, in verl's schema."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index},
    }


def write_prompt_files(
    folder: Path, data_source: str, split: tuple[Sequence[Problem], Sequence[Problem]]
) -> tuple[Path, Path]:
    """Write train.jsonl and val.jsonl, byte for byte the same every time; return their paths."""
    paths = folder / "train.jsonl", folder / "val.jsonl"
    for path, problems in zip(paths, split, strict=True):
        lines = [json.dumps(row(data_source, problem, i)) + "\n" for i, problem in enumerate(problems)]
        write_whole(path, "".join(lines))
    return paths
