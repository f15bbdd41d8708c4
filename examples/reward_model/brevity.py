"""Makes the example's reward model: a small Qwen2 with one label, trained to score brevity.

python -m examples.reward_model.brevity DIR
"""

import random
import sys
from pathlib import Path

import torch

from examples.arithmetic.problems import split
from examples.character_model import CHARACTERS, PAD, VOCABULARY, model_config, tokenizer

LONGEST = 40  # characters of a response
STEPS, BATCH_SIZE, LEARNING_RATE = 200, 32, 2e-3
NUM_LAYERS = 2
SEED = 1


def target(response: str) -> float:
    """Return the score to learn: 1 for an empty response, 0 for the longest."""
    return 1 - len(response) / LONGEST


def example(draw: random.Random, prompts: list[str]) -> tuple[str, str]:
    """Return a prompt, and a response of random characters and any length."""
    length = draw.randint(1, LONGEST)
    return draw.choice(prompts), "".join(draw.choices(CHARACTERS, k=length))


def train(steps: int = STEPS):
    """Return the model, trained from random weights."""
    from transformers import Qwen2ForSequenceClassification

    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    prompts = [problem.prompt for problem in split()[0]]
    config = model_config()
    config.num_labels = 1
    config.num_hidden_layers = NUM_LAYERS
    config.layer_types = config.layer_types[:NUM_LAYERS]
    model = Qwen2ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        examples = [example(draw, prompts) for _ in range(BATCH_SIZE)]
        rows = [[VOCABULARY[character] for character in prompt + response] for prompt, response in examples]
        tokens = torch.full((BATCH_SIZE, max(map(len, rows))), VOCABULARY[PAD])
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = torch.tensor(row)
        scores = model(input_ids=tokens, attention_mask=tokens != VOCABULARY[PAD], use_cache=False).logits[:, 0]
        loss = torch.nn.functional.mse_loss(scores, torch.tensor([target(response) for _, response in examples]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def make(folder: Path, steps: int = STEPS) -> Path:
    """Write the model and its tokenizer, unless they exist; return the folder."""
    if not (folder / "config.json").is_file():
        train(steps).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
