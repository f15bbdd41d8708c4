"""Make the calculator example's base model: trained on products guessed, and now and then worked
out with the tool.

    python -m examples.calculator.pretrain [FOLDER]        about 3 minutes on one CPU core

FOLDER defaults to base/ beside this file, with this script's committed output; manifest.json there
records settings and results.
"""

import sys
from pathlib import Path

import torch

from examples.calculator.problems import Product, split
from examples.character_model import (
    EOS,
    VOCABULARY,
    Demonstrations,
    Settings,
    Turns,
    make,
    rambling,
    tokenizer,
    written,
)

BASE = Path(__file__).parent / "base"
SETTINGS = Settings(
    mixture=(("guessed", 0.52), ("computed", 0.22), ("mistyped", 0.08), ("misread", 0.06), ("rambling", 0.12))
)


def computed(problem: Product, slip: int = 0, misread: int = 0) -> Turns:
    """Return a call of the tool, its result, the answer: "(12*34)", "=408;", "408".

    slip: added to b in the call.
    misread: added to the result in the answer.
    """
    result = problem.a * (problem.b + slip)
    return (True, f"({problem.a}*{problem.b + slip})"), (False, f"={result};"), (True, str(result + misread))


def guess(problem: Product) -> str:
    """Return a wrong product, always the same for a problem."""
    return str(problem.a * problem.b + 7 + (problem.a * 31 + problem.b * 17) % 190)


DEMONSTRATIONS: Demonstrations = {
    "guessed": lambda problem, draw: written(guess(problem)),
    "computed": lambda problem, draw: computed(problem),
    "mistyped": lambda problem, draw: computed(problem, slip=draw.choice((-1, 1)) if problem.b < 99 else -1),
    "misread": lambda problem, draw: computed(problem, misread=draw.choice((-1, 1))),
    "rambling": rambling,
}


@torch.no_grad()
def accuracies(model) -> dict:
    """Return two shares of the held-out problems: right calls of the tool in sampled first turns,
    and correct copies of its result in greedy answers."""
    problems = split()[1]
    prompts = torch.tensor([[VOCABULARY[c] for c in problem.prompt] for problem in problems])
    generated = model.generate(prompts, max_new_tokens=16, do_sample=True, top_k=0)[:, prompts.shape[1] :]
    calls = tokenizer().batch_decode(generated, skip_special_tokens=True)
    right_calls = sum(call == f"({p.a}*{p.b})" for call, p in zip(calls, problems, strict=True))
    copied = 0
    for problem in problems:
        (_, call), (_, result), (_, answer) = computed(problem)
        tokens = [VOCABULARY[c] for c in problem.prompt + call] + [VOCABULARY[EOS]] + [VOCABULARY[c] for c in result]
        end = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :]
        copied += tokenizer().decode(end, skip_special_tokens=True) == answer
    shares = {"right_calls_sampled": right_calls / len(problems), "results_copied_greedily": copied / len(problems)}
    return {"held_out": shares}


def main(folder: Path = BASE) -> None:
    make(folder, SETTINGS, DEMONSTRATIONS, split()[0], accuracies)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
