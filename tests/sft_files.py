"""A tiny model that chats, and files of conversations for it."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tests.tiny_models import make_tiny

# one letter per role, and the end-of-text token behind every message
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] + ':' }}{{ message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def make_chat_model(path: Path, layers: int = 2, vocab: int = 64) -> Path:
    """Write a tiny Qwen2 with a chat template, whose tokens are characters."""
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
