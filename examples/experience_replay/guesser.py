"""The demo's base model, taught to guess sums: near the answer, and right in one of twenty times.

About a minute on one CPU core; the same weights every time on the same machine.
"""

from pathlib import Path

import torch

from examples.arithmetic.pretrain import accuracies
from examples.arithmetic.problems import BASE, split
from examples.character_model import Demonstrations, Settings, learn, lessons, save, written

# twenty numbers, one of them the sum: the model learns single sums, and nothing for others
GUESSES: Demonstrations = {"guess": lambda problem, draw: written(str(problem.a + problem.b + draw.randint(-10, 9)))}
SETTINGS = Settings(steps=500, lr=1e-3, mixture=(("guess", 1.0),))


def make(folder: Path, settings: Settings = SETTINGS) -> dict:
    """Write the model there; return its manifest, with the accuracies on held-out sums."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(settings.seed)
    model = Qwen2ForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    for tokens, targets in lessons(settings, GUESSES, split()[0]):
        learn(model, optimizer, tokens, targets)
    return save(model.eval(), settings, folder, accuracies)
