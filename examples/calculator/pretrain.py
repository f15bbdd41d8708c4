"""Make the calculator example's base model: it has seen products guessed, and now and then worked out with the tool.

    python -m examples.calculator.pretrain [FOLDER]        about 3 minutes on one CPU core

The model and its characters are those of examples/arithmetic. FOLDER defaults to base/ beside this file, whose
committed content this script wrote; manifest.json there records how and what came out.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from examples.arithmetic.pretrain import EOS, IGNORED, MANIFEST, PAD, VOCABULARY, fit, sha256, tokenizer
from examples.calculator.problems import Product, split
from megatron_dapo.config.run_folder import write_whole

BASE = Path(__file__).parent / "base"

Turns = tuple[tuple[bool, str], ...]  # (whether the model wrote it, text); what the model wrote ends with EOS


@dataclass(frozen=True)
class Settings:
    """Everything the result depends on. `mixture` weighs the kinds of `DEMONSTRATIONS`."""

    seed: int = 1
    steps: int = 900
    batch_size: int = 64
    lr: float = 2e-3
    mixture: tuple[tuple[str, float], ...] = (
        ("guessed", 0.52),
        ("computed", 0.22),
        ("mistyped", 0.08),
        ("misread", 0.06),
        ("rambling", 0.12),
    )


def computed(problem: Product, slip: int = 0, misread: int = 0) -> Turns:
    """A call of the tool, its result, the answer: "(12*34)", "=408;", "408". slip: added to b in the call; misread: to
    the result in the answer."""
    result = problem.a * (problem.b + slip)
    return (True, f"({problem.a}*{problem.b + slip})"), (False, f"={result};"), (True, str(result + misread))


def guess(problem: Product) -> str:
    """A wrong product, the same for every sight of a problem."""
    return str(problem.a * problem.b + 7 + (problem.a * 31 + problem.b * 17) % 190)


DEMONSTRATIONS: dict[str, Callable[[Product, random.Random], Turns]] = {
    "guessed": lambda problem, draw: ((True, guess(problem)),),
    "computed": lambda problem, draw: computed(problem),
    "mistyped": lambda problem, draw: computed(problem, slip=draw.choice((-1, 1)) if problem.b < 99 else -1),
    "misread": lambda problem, draw: computed(problem, misread=draw.choice((-1, 1))),
    "rambling": lambda problem, draw: ((True, " ".join(draw.choice(("hm", "well", "let me see")) for _ in range(3))),),
}


def demonstration(settings: Settings, problems: list[Product], draw: random.Random) -> tuple[str, Turns]:
    """A prompt and one way to respond to it."""
    kinds, weights = zip(*settings.mixture, strict=True)
    problem = draw.choice(problems)
    return problem.prompt, DEMONSTRATIONS[draw.choices(kinds, weights)[0]](problem, draw)


def batch(demonstrations: list[tuple[str, Turns]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), both [B, S] int64; targets are IGNORED where the model does not write the next token."""
    rows = []  # of (token, whether it is a target)
    for prompt, turns in demonstrations:
        row = [(VOCABULARY[c], False) for c in prompt]
        for own, text in turns:
            row += [(VOCABULARY[c], own) for c in text] + ([(VOCABULARY[EOS], True)] if own else [])
        rows.append(row)
    tokens = torch.full((len(rows), max(map(len, rows))), VOCABULARY[PAD])
    targets = torch.full_like(tokens, IGNORED)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor([token for token, _ in row])
        targets[i, : len(row) - 1] = torch.tensor([token if own else IGNORED for token, own in row[1:]])
    return tokens, targets


def train(settings: Settings, report: Callable[[int, float], None] = lambda step, loss: None):
    """Supervised training from random weights; returns the model. `report(step, loss)` is called after every step."""
    problems, _ = split()
    return fit(
        settings,
        lambda draw: batch([demonstration(settings, problems, draw) for _ in range(settings.batch_size)]),
        report,
    )


@torch.no_grad()
def answer_accuracy(model, problems: list[Product]) -> dict[str, float]:
    """Share of sampled first turns that call the tool with the right product, and of greedy answers that copy a result
    rightly once it is there."""
    prompts = torch.tensor([[VOCABULARY[c] for c in problem.prompt] for problem in problems])
    generated = model.generate(prompts, max_new_tokens=16, do_sample=True, top_k=0)[:, prompts.shape[1] :]
    calls = tokenizer().batch_decode(generated, skip_special_tokens=True)
    right_calls = sum(call == f"({p.a}*{p.b})" for call, p in zip(calls, problems, strict=True))
    copied = 0
    for problem in problems:
        (_, call), (_, result), (_, answer) = computed(problem)
        tokens = [VOCABULARY[c] for c in problem.prompt + call] + [VOCABULARY[EOS]] + [VOCABULARY[c] for c in result]
        written = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :]
        copied += tokenizer().decode(written, skip_special_tokens=True) == answer
    return {"right_calls_sampled": right_calls / len(problems), "results_copied_greedily": copied / len(problems)}


def save(model, settings: Settings, folder: Path) -> dict:
    """Write the Hugging Face checkpoint (bfloat16) and manifest.json; returns the manifest."""
    from transformers import GenerationConfig

    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=VOCABULARY[EOS], pad_token_id=VOCABULARY[PAD])
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    manifest = {
        "settings": asdict(settings),
        "held_out": answer_accuracy(model.float(), split()[1]),
        "sha256": {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name != MANIFEST},
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def main(folder: Path = BASE) -> None:
    settings = Settings()

    def report(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step:4d}/{settings.steps}   loss {loss:.3f}", flush=True)

    manifest = save(train(settings, report), settings, folder)
    print(f"{folder}: {manifest['held_out']}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
