"""Two-digit sums: the problems, their text and the files the trainer reads.

`python -m examples.arithmetic.problems DIR` writes the files for a training started elsewhere.
"""

import sys
from operator import add
from pathlib import Path

from examples.prompts import Problem, held_apart, write_prompt_files

BASE = Path(__file__).parent / "base"  # the base model, made by pretrain.py
NUM_HELD_OUT = 200
SPLIT_SEED = 20


class Sum(Problem):
    wording = "{a}+{b}="
    solve = staticmethod(add)


def split() -> tuple[list[Sum], list[Sum]]:
    """Return all 8100 problems as (training, held out)."""
    return held_apart(Sum, range(10, 100), NUM_HELD_OUT, SPLIT_SEED)


def write_files(folder: Path) -> tuple[Path, Path]:
    return write_prompt_files(folder, "arithmetic", split())


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
