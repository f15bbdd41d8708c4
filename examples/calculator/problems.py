"""Two-digit products: the problems, their text and the files the trainer reads."""

from operator import mul
from pathlib import Path

from examples.prompts import Problem, held_apart, write_prompt_files

NUM_HELD_OUT = 100
SPLIT_SEED = 21


class Product(Problem):
    wording = "{a}*{b}?"
    solve = staticmethod(mul)


def split() -> tuple[list[Product], list[Product]]:
    """Return all 8100 problems as (training, held out)."""
    return held_apart(Product, range(10, 100), NUM_HELD_OUT, SPLIT_SEED)


def write_files(folder: Path) -> tuple[Path, Path]:
    return write_prompt_files(folder, "calculator", split())
