"""A tiny model that chats, files of conversations for it,
and the loss that they have by definition."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from tests.tiny_models import make_tiny

# one letter per role, and the end-of-text token behind every message
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] + ':' }}{{ message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def make_chat_model(path: Path, layers: int = 2, vocab: int = 64) -> Path:
    """Write a tiny Qwen2 with a chat template, its tokens characters."""
    make_tiny(path, "qwen2", layers=layers, vocab=vocab)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def conversations(number: int, seed: int) -> list[dict]:
    """Rows of both kinds, of one to three turns, of many lengths."""
    rng = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(rng.choice("0123456789abcxyz +-=") for _ in range(rng.randint(1, longest)))

    rows: list[dict] = []
    for place in range(number):
        if place % 3 == 0:
            rows.append({"prompt": text(12), "response": text(30)})
            continue
        messages = [{"role": "system", "content": text(5)}] if place % 2 else []
        for _ in range(rng.randint(1, 3)):
            messages += [{"role": "user", "content": text(10)}, {"role": "assistant", "content": text(20)}]
        rows.append({"messages": messages})
    return rows


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mean_loss_of(logits_of: Callable[[Tensor], Tensor], model: Path, file: Path, number: int) -> Tensor:
    """Return the mean of -log p over the assistant's words in the first rows of a file. Each
    conversation goes by itself, with labels of -100 outside the assistant's words. logits_of: [1,
    S] tokens -> [1, S, V]."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]

    def row_of(row: dict) -> tuple[Tensor, Tensor]:
        messages = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        tokens: list[int] = []
        labels: list[int] = []
        for message in messages:
            head = [vocabulary[message["role"][0]], vocabulary[":"]]
            words = [*(vocabulary[c] for c in message["content"]), vocabulary["<eos>"]]
            tokens += head + words
            labels += [-100] * 2 + (words if message["role"] == "assistant" else [-100] * len(words))
        return torch.tensor([tokens]), torch.tensor([labels])

    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, labels in map(row_of, map(json.loads, file.read_text().splitlines()[:number])):
        logits = logits_of(tokens)
        total = total + torch.nn.functional.cross_entropy(
            logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum"
        )
        count += int((labels[0, 1:] != -100).sum())
    return total / count
