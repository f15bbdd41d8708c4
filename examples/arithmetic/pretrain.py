"""Make the demo's base model: a small Qwen2 over characters, trained on sums with good, bad and no
answers.

    python -m examples.arithmetic.pretrain [FOLDER]        about 2.5 minutes on one CPU core

The mixture of demonstrations makes samples go the right way (digit by digit) now and then. The
likeliest answer is mostly a wrong guess: the state of a language model before reinforcement
learning. FOLDER defaults to base/ beside this file, with this script's committed output;
manifest.json there records settings and results.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.arithmetic.problems import BASE, Sum, split
from examples.arithmetic.reward import is_right
from examples.character_model import VOCABULARY, Demonstrations, Settings, make, rambling, tokenizer, written

SETTINGS = Settings(mixture=(("right", 0.08), ("wrong", 0.42), ("worked", 0.28), ("slipped", 0.02), ("rambling", 0.20)))


def worked(problem: Sum, slip: int = 0) -> str:
    """Return the sum worked out by digits: 45+38 -> "5+8+0=13,4+3+1=8:83".

    `slip` is added to the sum of the ones.
    """
    (a_tens, a_ones), (b_tens, b_ones) = divmod(problem.a, 10), divmod(problem.b, 10)
    ones = a_ones + b_ones + slip
    carry = int(ones > 9)
    tens = a_tens + b_tens + carry
    return f"{a_ones}+{b_ones}+0={ones},{a_tens}+{b_tens}+{carry}={tens}:{tens}{ones % 10}"


def wrong(problem: Sum) -> str:
    """Return a wrong guess, always the same for a problem: a forgotten carry, an invented one, or
    one too many."""
    if problem.a % 10 + problem.b % 10 > 9:
        return str(problem.a + problem.b - 10)
    return str(problem.a + problem.b + (10 if problem.a < problem.b else 1))


DEMONSTRATIONS: Demonstrations = {
    "right": lambda problem, draw: written(problem.answer),
    "wrong": lambda problem, draw: written(wrong(problem)),
    "worked": lambda problem, draw: written(worked(problem)),
    "slipped": lambda problem, draw: written(worked(problem, slip=draw.choice((-1, 1)) if problem.a % 10 else 1)),
    "rambling": rambling,
}


def accuracies(model) -> dict:
    """Return the shares of held-out sums with a right answer."""
    held_out = split()[1]
    shares = {"greedy": accuracy(model, held_out, sample=False), "sampled": accuracy(model, held_out, sample=True)}
    return {"held_out_accuracy": shares}


@torch.no_grad()
def accuracy(model, problems: Sequence[Sum], sample: bool) -> float:
    """Return the share of right answers, greedy or sampled at temperature 1."""
    prompts = torch.tensor([[VOCABULARY[c] for c in problem.prompt] for problem in problems])
    generated = model.generate(prompts, max_new_tokens=40, do_sample=sample, top_k=0 if sample else None)
    texts = tokenizer().batch_decode(generated[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(is_right(text, problem.answer) for text, problem in zip(texts, problems, strict=True)) / len(problems)


def main(folder: Path = BASE) -> None:
    make(folder, SETTINGS, DEMONSTRATIONS, split()[0], accuracies)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
