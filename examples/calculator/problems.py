"""Two-digit products: the problems, their text and the files the trainer reads."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config.run_folder import write_whole

NUM_HELD_OUT = 100
SPLIT_SEED = 21


@dataclass(frozen=True)
class Product:
    """A problem a * b with 10 <= a, b <= 99."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}*{self.b}?"

    @property
    def answer(self) -> str:
        return str(self.a * self.b)


def split() -> tuple[list[Product], list[Product]]:
    """All 8100 problems as (training, held out), always the same two lists, without a common problem."""
    problems = [Product(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def row(problem: Product, index: int) -> dict:
    """One line of a prompt file, in verl's schema."""
    return {
        "data_source": "calculator",
        "prompt": [{"role": "user", "content": problem.prompt}],
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index},
    }


def write_files(folder: Path) -> tuple[Path, Path]:
    """Write train.jsonl and val.jsonl, byte for byte the same every time; returns their paths."""
    paths = folder / "train.jsonl", folder / "val.jsonl"
    for path, problems in zip(paths, split(), strict=True):
        write_whole(path, "".join(json.dumps(row(problem, i)) + "\n" for i, problem in enumerate(problems)))
    return paths
