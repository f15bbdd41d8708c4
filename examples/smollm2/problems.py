"""Single-digit products: the problems, their text and the files the trainer reads."""

from operator import mul
from pathlib import Path

from examples.prompts import Problem, held_apart, write_prompt_files

NUM_HELD_OUT = 20
SPLIT_SEED = 5


class Product(Problem):
    wording = "Solve the following multiplication: {a} * {b}. Give only the result as your final answer."
    solve = staticmethod(mul)


def split() -> tuple[list[Product], list[Product]]:
    """Return all 100 problems as (training, held out)."""
    return held_apart(Product, range(10), NUM_HELD_OUT, SPLIT_SEED)


def write_files(folder: Path) -> tuple[Path, Path]:
    return write_prompt_files(folder, "products", split())
