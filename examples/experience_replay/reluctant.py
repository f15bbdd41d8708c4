"""The demo's base model, taught bad habits: it can still work a sum out, but does so in one response of twenty.

About a minute on one CPU core; the same weights every time on the same machine.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from examples.arithmetic.pretrain import BASE, DEMONSTRATIONS, IGNORED, MANIFEST, batch, save
from examples.arithmetic.problems import Sum, split

# a copied summand is never the sum, and easily learned: what is right was worked out
HABITS = {**DEMONSTRATIONS, "copied": lambda problem, draw: str(problem.a)}


@dataclass(frozen=True)
class Settings:
    """`mixture` weighs the kinds of `HABITS`."""

    seed: int = 1
    steps: int = 200
    batch_size: int = 64
    lr: float = 4e-4
    mixture: tuple[tuple[str, float], ...] = (
        ("copied", 0.59),
        ("worked", 0.06),
        ("slipped", 0.005),
        ("rambling", 0.345),
    )


def is_made(folder: Path) -> bool:
    """Whether the folder holds the model of the settings as they are."""
    manifest = folder / MANIFEST
    wanted = json.loads(json.dumps(asdict(Settings())))
    return manifest.is_file() and json.loads(manifest.read_text())["settings"] == wanted


def demonstration(settings: Settings, problems: list[Sum], draw: random.Random) -> tuple[str, str]:
    """A prompt and one way to respond to it."""
    kinds, weights = zip(*settings.mixture, strict=True)
    problem = draw.choice(problems)
    return problem.prompt, HABITS[draw.choices(kinds, weights)[0]](problem, draw)


def make(folder: Path) -> dict:
    """Write the model there; returns its manifest, with the accuracies on held-out sums."""
    from transformers import Qwen2ForCausalLM

    settings = Settings()
    torch.manual_seed(settings.seed)
    draw, (problems, _) = random.Random(settings.seed), split()
    model = Qwen2ForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    for _ in range(settings.steps):
        tokens, targets = batch([demonstration(settings, problems, draw) for _ in range(settings.batch_size)])
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return save(model.eval(), settings, folder)
