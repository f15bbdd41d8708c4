"""What a loss of the user's own (`actor_rollout_ref.actor.loss_function`) is given, and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import import_attribute


@dataclass(frozen=True, eq=False)
class LossSequence:
    """The tokens of one response, from the first that the model wrote to the last; every field is [T] float32.

    log_probs: of the policy as it is, with gradient; 0 where the mask is 0. All other fields are without gradient.
    old_log_probs: of the policy before the update. With one optimizer step per rollout step those of the policy as it
    is. rollout_log_probs: by the server that sampled the token. ref_log_probs: of the reference model, None where there
    is none. advantages: the same for every token, but with an estimator per token. mask: 1 where the model wrote the
    token, 0 for an environment's tokens between its turns. entropy: of the policy's distribution over the vocabulary,
    with gradient, where `actor.calculate_entropy` is true; else None.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    mask: Tensor
    entropy: Tensor | None = None


SequenceLossAnswer = tuple[Tensor, Tensor | float, Mapping[str, tuple[Tensor | float, Tensor | float]]]
"""(summed loss, with gradient; count; metrics: name -> (sum, count)).

What is minimised is the sum of all losses over the sum of all counts, over micro-batches and ranks: so that nothing
depends on how a mini-batch was cut, neither may be divided by numbers of a micro-batch.
"""

SequenceLossFunction = Callable[[Sequence[LossSequence]], SequenceLossAnswer]
"""Called once per micro-batch on every rank of the last pipeline stage, with the sequences that have tokens to learn
from; at least one. Sequences lie whole in a micro-batch."""


def load_loss_function(key: str, path: str) -> SequenceLossFunction:
    """Import `package.module:function`, which a config key names. Raises UserError with one sentence where it is
    none."""
    function = import_attribute(key, path, "package.module:function")
    if not callable(function):
        raise UserError(f"{key}: {path!r} is no function but {type(function).__name__}.")
    return function


def checked_answer(key: str, answer: Any) -> SequenceLossAnswer:
    """Return what the function that a config key names answered. Raises UserError where it is not what was asked for;
    reads nothing back from the device."""
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
