"""Reward functions by name: the built-in table, custom functions by import path, and the choice by
data source."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.built_ins import BUILT_IN_REWARDS, BY_DATA_SOURCE, estimator_of
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rewards.code.cases import read_cases
from megatron_dapo.rewards.forms import RewardForm, RewardRequest, Scored, arguments_of, form_of, results_of
from megatron_dapo.rewards.reward_result import RewardResult

_SHOWN_CHARS = 60
_NAMED_FAULTS = 3

WRONG_SCORES = dict.fromkeys(BUILT_IN_REWARDS, 0.0) | {"math_dapo": -1.0}
"""The built-in functions' scores of a wrong answer."""

DATA_SOURCES = {
    "math_dapo*": "math_dapo",
    "math": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "math_verify",
    "*gsm8k*": "math_verify",
    "*MATH*": "math_verify",
    "reasoning_gym/*": "reasoning_gym",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code_tests"),
}
"""`by_data_source`: pattern of the data source -> built-in function; the first that matches. The
names that verl gives its data get scores in the range of verl's own rewards: +1 and -1, or 1 and
0."""


def function_name(function: str, data_source: str) -> str:
    """Return the name or path of the function for a data source: `function` itself, or
    by_data_source's choice. Raises UserError."""
    if function != BY_DATA_SOURCE:
        return function
    for pattern, name in DATA_SOURCES.items():
        if fnmatchcase(data_source, pattern):
            return name
    known = ", ".join(DATA_SOURCES)
    raise UserError(
        f"reward.function: by_data_source has no verifier for data source {data_source!r} (it has: {known}); "
        f"set reward.function to one of {', '.join(BUILT_IN_REWARDS)} or to package.module:function."
    )


def check_reward(function: str, kwargs: dict[str, Any], data_sources: Iterable[str] = ()) -> None:
    """Raise UserError for an unknown name, or a data source without a function in by_data_source.
    Imports nothing."""
    if function == BY_DATA_SOURCE:
        if kwargs:
            raise UserError(
                f"reward.kwargs: by_data_source takes none, got {sorted(kwargs)}; name one reward.function to use them."
            )
        for source in data_sources:
            function_name(function, source)
    elif function not in BUILT_IN_REWARDS and ":" not in function:
        names = [*BUILT_IN_REWARDS, BY_DATA_SOURCE]
        near = difflib.get_close_matches(function, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"reward.function: {function!r} is not known; use one of {', '.join(names)}, "
            f"or package.module:function.{hint}"
        )


def check_ground_truths(function: str, prompts: Iterable[Prompt]) -> None:
    """Raise UserError for prompts scored by `code_tests` without tests in their ground truth."""
    faults = []
    for prompt in prompts:
        if function_name(function, prompt.data_source) == "code_tests":
            try:
                read_cases(prompt.ground_truth)
            except ValueError as error:
                faults.append(f"the prompt {prompt.text[:_SHOWN_CHARS]!r} of {prompt.data_source!r}: {error}.")
    if num_more := max(0, len(faults) - _NAMED_FAULTS):
        faults = [*faults[:_NAMED_FAULTS], f"{num_more} more prompts have ground truths without tests."]
    if faults:
        raise UserError(faults)


def wrong_score(function: str, data_source: str, custom: float = 0.0) -> float:
    """Return the score of a wrong answer, for responses that got no verdict.

    custom: that of a function by import path.
    """
    if function == BY_DATA_SOURCE:
        row = next((name for pattern, name in DATA_SOURCES.items() if fnmatchcase(data_source, pattern)), "")
        return WRONG_SCORES[row] if row else 0.0
    return WRONG_SCORES.get(function, custom)


def check_estimator(estimator: str, function: str, data_sources: Iterable[str], custom: float = 0.0) -> None:
    """Raise UserError for a negative score of wrong answers by whose mean the estimator divides.
    custom: see `wrong_score`."""
    if not estimator_of(estimator).divides_by_mean:
        return
    for source in data_sources:
        if (score := wrong_score(function, source, custom)) < 0:
            raise UserError(
                f"reward.function is {function}, which scores wrong answers{source and f' of {source!r}'} {score:g}, "
                f"but algorithm.adv_estimator is {estimator}, which divides by the mean of rewards; choose a function "
                f"that gives wrong answers 0, such as math_verify, or another estimator."
            )


@cache
def load(function: str) -> Callable[..., Any]:
    """Import the function of a built-in name or of a path `package.module:function`. Raises
    UserError."""
    path = BUILT_IN_REWARDS.get(function, function)
    return OwnFunction.load("reward.function", path, name=function).function


def form_of_name(function: str) -> RewardForm:
    """Return the form of a function by name or path; by_data_source and its functions score one
    response. Raises UserError."""
    return RewardForm(Scored.ONE, is_async=False) if function == BY_DATA_SOURCE else form_of(load(function))


def check_signature(function: str, kwargs: dict[str, Any]) -> None:
    """Raise UserError if the function cannot be called with four positions and these keyword
    arguments."""
    try:
        inspect.signature(load(function)).bind("", "", "", {}, **kwargs)
    except TypeError as error:
        raise UserError(
            f"reward.{'kwargs' if kwargs else 'function'}: {function} cannot be called as "
            f"({form_of(load(function)).scored.value}, **{kwargs}): {error}; correct it."
        ) from None
    if function in BUILT_IN_REWARDS:
        _check_values(function, kwargs)


def _check_values(function: str, kwargs: dict[str, Any]) -> None:
    """Raise UserError for values of the wrong type or size for a built-in function."""
    parameters = inspect.signature(load(function)).parameters
    for name, value in kwargs.items():
        kind = parameters[name].annotation
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (kind in (int, float) and value <= 0):
            wanted = {bool: "true or false", str: "text", int: "a number above 0", float: "a number above 0"}[kind]
            raise UserError(
                f"reward.kwargs.{name} is {value!r}, but reward.function {function} takes {wanted}; correct it."
            )


def score_response(
    function: str,
    kwargs: dict[str, Any],
    data_source: str,
    response: str,
    ground_truth: str,
    extra_info: dict[str, Any],
) -> RewardResult:
    """Call a function (a built-in name or package.module:function) that scores one response in this
    process; return its verdict. Raises UserError for an unknown one, besides any error of it."""
    [result] = score_responses(function, kwargs, [RewardRequest(data_source, response, ground_truth, extra_info)])
    return result


def score_responses(function: str, kwargs: dict[str, Any], requests: Sequence[RewardRequest]) -> list[RewardResult]:
    """Call the function once in this process; return its verdicts.

    Args:
        function: a built-in name or package.module:function, not a coroutine.
        kwargs: its keyword arguments.
        requests: the number that its form takes at once.

    Raises:
        ValueError: for invalid verdicts; besides any error of the function.
    """
    call = load(function_name(function, requests[0].data_source))
    scored = form_of(call).scored
    returned = call(*arguments_of(scored, requests), **kwargs)
    return results_of(scored, returned, [request.response for request in requests])


async def score_responses_async(
    function: str, kwargs: dict[str, Any], requests: Sequence[RewardRequest]
) -> list[RewardResult]:
    """Await a coroutine function; else do as `score_responses`."""
    call = load(function)
    scored = form_of(call).scored
    returned = await call(*arguments_of(scored, requests), **kwargs)
    return results_of(scored, returned, [request.response for request in requests])
