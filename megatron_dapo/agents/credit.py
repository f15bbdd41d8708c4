"""Shares a trajectory's advantage among its branches, by a function of the user (`agent.credit`)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import import_attribute
from megatron_dapo.config.key_names import AGENT
from megatron_dapo.data.batching import Credit, even_credit
from megatron_dapo.data.samples import Sample

_KEY = f"{AGENT}.credit"


def load_credit(path: str | None) -> Credit:
    """Return the function at `package.module:name`, with its answers checked; None: 1 for all.

    The function gets a finished trajectory and returns a finite factor per branch, in their order.
    Both it and the returned one raise UserError, in one sentence, for anything else.
    """
    if path is None:
        return even_credit
    function = import_attribute(_KEY, path, "package.module:function")
    if not callable(function):
        raise UserError(f"{_KEY}: {path!r} is no function but {type(function).__name__}.")
    return partial(_checked, path, function)


def _checked(path: str, function: Callable[[Sample], Any], sample: Sample) -> Sequence[float]:
    number = len(sample.branches)
    try:
        answer = function(sample)
        factors = tuple(map(float, islice(answer, number + 1)))
    except Exception as error:
        raise UserError(
            f"{_KEY}: {path} failed for a trajectory of group {sample.uid} ({type(error).__name__}: {error}); it must "
            f"return a number per branch."
        ) from error
    if len(factors) != number or not all(map(math.isfinite, factors)):
        raise UserError(
            f"{_KEY}: {path} must return {number} finite numbers for the {number} branches of a trajectory of group "
            f"{sample.uid}; it returned {repr(answer)[:100]}."
        )
    return factors
