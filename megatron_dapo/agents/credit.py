"""Shares a trajectory's advantage among its branches, by a function of the user (`agent.credit`)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import import_attribute
from megatron_dapo.config.key_names import AGENT
from megatron_dapo.data.batching import Credit
from megatron_dapo.data.samples import Sample

_KEY = f"{AGENT}.credit"


def load_credit(path: str) -> Credit:
    """Return the function at `package.module:name`, with its answers checked.

    It gets a finished trajectory and returns a finite factor per branch, in their order. UserError
    is raised here, or by the function, for anything else.
    """
    function = import_attribute(_KEY, path, "package.module:function")
    if not callable(function):
        raise UserError(f"{_KEY}: {path!r} is no function but {type(function).__name__}.")
    return partial(_checked, path, function)


def _checked(path: str, function: Callable[[Sample], Any], sample: Sample) -> Sequence[float]:
    number = len(sample.branches)
    of = f"a trajectory of group {sample.uid}"
    try:
        answer = function(sample)
        factors = tuple(map(float, islice(answer, number + 1)))
    except Exception as error:
        failure = f"({type(error).__name__}: {error}); it must return a number per branch."
        raise UserError(f"{_KEY}: {path} failed for {of} {failure}") from error
    if len(factors) != number or not all(map(math.isfinite, factors)):
        needed = f"{number} finite numbers for the {number} branches of {of}"
        raise UserError(f"{_KEY}: {path} must return {needed}; it returned {repr(answer)[:100]}.")
    return factors
