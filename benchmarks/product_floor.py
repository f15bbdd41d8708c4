"""The CPU seconds of only a step's matrix products, in float32 on one thread.

No trainer with these products is cheaper.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

REPEATS = 5


@dataclass(frozen=True)
class Products:
    """The weights of a decoder's products, (outputs, inputs) each: all layers' and the head's."""

    layers: tuple[tuple[int, int], ...]
    head: tuple[int, int]

    @classmethod
    def of_model(cls, folder: Path) -> "Products":
        """Return those of a dense Hugging Face checkpoint, merged as by trainers and servers."""
        config = json.loads((folder / "config.json").read_text())
        hidden = config["hidden_size"]
        ffn = config["intermediate_size"]
        heads = config["num_attention_heads"]
        width = config.get("head_dim", hidden // heads)
        attended = heads * width
        qkv = attended + 2 * config["num_key_value_heads"] * width
        layer = ((qkv, hidden), (hidden, attended), (2 * ffn, hidden), (hidden, ffn))
        return cls(layer * config["num_hidden_layers"], (config["vocab_size"], hidden))


@dataclass(frozen=True)
class Step:
    """The sizes of a rollout step's computation."""

    num_samples: int
    prompt_length: float  # mean per sample, in tokens, as is response_length
    response_length: float
    rows: int  # of the products in training

    @property
    def length(self) -> float:
        return self.prompt_length + self.response_length


def floor(products: Products, step: Step) -> dict[str, float]:
    """Return the CPU seconds per sample of the step's parts.

    Sampling reads the prompts at once and writes all responses token by token, in one batch.
    Training scores all tokens once, for the old log-probs, and goes forward and backward once. The
    head meets only the responses.
    """
    read = _seconds(_forward, products.layers, step.rows)
    write = _seconds(_forward, (*products.layers, products.head), step.num_samples)
    head = _seconds(_forward, (products.head,), step.rows)
    both = _seconds(_forward_and_backward, products.layers, step.rows)
    head_both = _seconds(_forward_and_backward, (products.head,), step.rows)
    return {
        "sampling": step.prompt_length * read + step.response_length * write,
        "old log-probs": step.length * read + step.response_length * head,
        "update": step.length * both + step.response_length * head_both,
    }


def _seconds(work: Callable[[torch.Tensor, torch.Tensor], object], shapes: tuple, num_rows: int) -> float:
    """Return the CPU seconds per row of products with such weights, each shape's fastest."""
    by_shape = {}
    for outputs, inputs in set(shapes):
        weight = torch.randn(outputs, inputs)
        rows = torch.randn(num_rows, inputs)
        work(rows, weight)
        by_shape[outputs, inputs] = min(_timed(work, rows, weight) for _ in range(REPEATS))
    return sum(by_shape[shape] for shape in shapes) / num_rows


def _timed(work: Callable[[torch.Tensor, torch.Tensor], object], rows: torch.Tensor, weight: torch.Tensor) -> float:
    # so that the clock's ticks do not show
    repeats = max(1, round(2e8 / (len(rows) * weight.numel())))
    start = time.process_time()
    for _ in range(repeats):
        work(rows, weight)
    return (time.process_time() - start) / repeats


def _forward(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(rows, weight)


def _forward_and_backward(rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Compute the product and those of its gradient, for the rows and for the weight."""
    gradient = linear(rows, weight)  # any values of this shape
    gradient @ weight
    gradient.t() @ rows
