"""Trial of a user's own loss with made-up sequences.

`python -m megatron_dapo.checks.loss_trial PATH ANSWER` makes the file ANSWER: a JSON list of
sentences, empty for a valid return value. An exception of the function decides nothing: it may need
a run's process groups or its GPU.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_dapo.algorithms.sequence_loss import (
    LossSequence,
    SequenceLossFunction,
    checked_answer,
)
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.key_names import LOSS_FUNCTION

_LENGTHS = (3, 5)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the faults of the function, as sentences."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo.checks.loss_trial")
    parser.add_argument("path")
    parser.add_argument("answer", type=Path)
    parser.add_argument("--reference", action="store_true", help="there are log-probs of a reference model")
    parser.add_argument("--entropy", action="store_true", help="there is the entropy")
    arguments = parser.parse_args(argv)
    sentences: list[str] = []
    try:
        _try_loss(OwnFunction.load(LOSS_FUNCTION, arguments.path).function, arguments.reference, arguments.entropy)
    except UserError as error:
        sentences = error.sentences
    arguments.answer.write_text(json.dumps(sentences), encoding="utf-8")


def _try_loss(function: SequenceLossFunction, with_reference: bool, with_entropy: bool) -> None:
    """Call the function once. Raises UserError for an invalid return value."""
    sequences = [_sequence(length, with_reference, with_entropy) for length in _LENGTHS]
    _, number, _ = checked_answer(LOSS_FUNCTION, function(sequences))
    if not float(number).is_integer():
        raise UserError(f"{LOSS_FUNCTION}: the function must return a whole number as its count, not {number:g}.")


def _sequence(length: int, with_reference: bool, with_entropy: bool) -> LossSequence:
    log_probs = torch.linspace(-2.0, -0.5, length)
    return LossSequence(
        log_probs=log_probs.clone().requires_grad_(),
        old_log_probs=log_probs - 0.01,
        rollout_log_probs=log_probs - 0.02,
        ref_log_probs=log_probs - 0.1 if with_reference else None,
        advantages=torch.full((length,), 1.0 if length % 2 else -1.0),
        mask=torch.ones(length),
        entropy=torch.full((length,), 1.5).requires_grad_() if with_entropy else None,
    )


if __name__ == "__main__":
    main()
