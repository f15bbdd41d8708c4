"""A loss of the user's own (`actor_rollout_ref.actor.loss_function`): its inputs and its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_dapo.common.errors import UserError


@dataclass(frozen=True, eq=False)
class LossSequence:
    """The tokens of one response, from the model's first to its last; every field is [T] float32.

    Only log_probs and entropy have a gradient.
    """

    log_probs: Tensor
    """Of the current policy; 0 at a mask of 0."""
    old_log_probs: Tensor
    """Of the policy before the update.

    With one optimizer step per rollout step, of the current policy.
    """
    rollout_log_probs: Tensor
    """By the server that sampled the token."""
    ref_log_probs: Tensor | None
    """Of the reference model; None without one."""
    advantages: Tensor
    """The same for every token, except with an estimator per token."""
    mask: Tensor
    """1 for the model's tokens, 0 for an environment's between its turns."""
    entropy: Tensor | None = None
    """Of the policy over the vocabulary, with `actor.calculate_entropy`; else None."""


SequenceLossAnswer = tuple[Tensor, Tensor | float, Mapping[str, tuple[Tensor | float, Tensor | float]]]
"""(summed loss, with gradient; count; metrics: name -> (sum, count)).

Training minimises the sum of all losses over the sum of all counts, over micro-batches and ranks.
Neither may be divided by numbers of a micro-batch, so that nothing depends on the cut of a
mini-batch.
"""

SequenceLossFunction = Callable[[Sequence[LossSequence]], SequenceLossAnswer]
"""Called once per micro-batch on every rank of the last pipeline stage.

It gets the sequences with tokens to learn from, at least one. Sequences lie whole in a micro-batch.
"""


def checked_answer(key: str, answer: Any) -> SequenceLossAnswer:
    """Return the answer of a config key's function. Raises UserError for an answer of another form.

    Reads nothing back from the device.
    """
    if isinstance(answer, tuple) and len(answer) == 3:
        loss_sum, number, metrics = answer
        pairs = list(metrics.values()) if isinstance(metrics, dict) else [None]
        numbers = [loss_sum, number]
        for pair in pairs:
            numbers += pair if isinstance(pair, tuple) and len(pair) == 2 else [None]
        if all(isinstance(each, int | float) or (isinstance(each, Tensor) and each.ndim == 0) for each in numbers):
            return loss_sum, number, metrics
    raise UserError(
        f"{key}: the function must return (summed loss, count, metrics), scalars and a dict of name -> "
        f"(sum, count); it returned {_described(answer)}."
    )


def _described(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(_described(each) for each in answer)})"
    return f"a tensor of shape {list(answer.shape)}" if isinstance(answer, Tensor) else repr(answer)[:100]
