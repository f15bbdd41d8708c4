"""Metric sums of several pieces put together, as a reduction over micro-batches and ranks does."""

import torch


def add_sums(a, b):
    """Return both added up; names may differ."""
    total = dict(a)
    for name, (amount, count) in b.items():
        old_amount, old_count = total.get(name, (0, 0))
        total[name] = (old_amount + amount, old_count + count)
    return total


def merge_maxima(a, b):
    """Return the larger of both, name by name."""
    return a | {name: torch.maximum(a[name], value) if name in a else value for name, value in b.items()}
