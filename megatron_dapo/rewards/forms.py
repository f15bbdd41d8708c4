"""The forms of a reward function: for one response, all responses to a prompt, or any batch;
coroutine or not. Its parameters tell the form."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

from megatron_dapo.rewards.answers import ANSWER_CHARS, answer_of
from megatron_dapo.rewards.reward_result import RewardResult


class Scored(Enum):
    """The responses that one call of a reward function scores; the values are its parameters."""

    ONE = "data_source, response, ground_truth, extra_info"
    GROUP = "data_source, responses, ground_truth, extra_info"
    BATCH = "data_sources, responses, ground_truths, extra_infos"


@dataclass(frozen=True)
class RewardForm:
    """How a reward function is called. is_async: its call is awaited, and others go on
    meanwhile."""

    scored: Scored
    is_async: bool


class RewardRequest(NamedTuple):
    """The arguments of a reward function for one response."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: dict[str, Any]


def form_of(function: Callable[..., Any]) -> RewardForm:
    """Return a function's form. For several responses its second parameter is named `responses`;
    for several prompts its third is `ground_truths`."""
    names = [*inspect.signature(function).parameters, "", "", ""]
    scored = Scored.ONE
    if names[1] == "responses":
        scored = Scored.BATCH if names[2] == "ground_truths" else Scored.GROUP
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return RewardForm(scored, is_async)


def arguments_of(scored: Scored, requests: Sequence[RewardRequest]) -> tuple[Any, ...]:
    """Return the four positional arguments for these requests: one for `Scored.ONE`, those of one
    prompt for `Scored.GROUP`."""
    if scored is Scored.ONE:
        return tuple(*requests)
    columns = [list(column) for column in zip(*requests, strict=True)]
    if scored is Scored.BATCH:
        return tuple(columns)
    (data_source, *_), responses, (ground_truth, *_), (extra_info, *_) = columns
    return data_source, responses, ground_truth, extra_info


def results_of(scored: Scored, returned: Any, responses: Sequence[str]) -> list[RewardResult]:
    """Return a result per response. Raises ValueError for invalid verdicts, or a number unlike that
    of the responses."""
    if inspect.iscoroutine(returned):
        returned.close()
        raise ValueError("the reward function returned a coroutine, but is none; write it with async def")
    if scored is Scored.ONE:
        return [_result(returned, responses[0])]
    if not isinstance(returned, Iterable) or isinstance(returned, dict | str):
        raise ValueError(f"the reward function returned {str(returned)[:100]}, not a list of verdicts")
    verdicts = list(returned)
    if len(verdicts) != len(responses):
        raise ValueError(f"the reward function returned {len(verdicts)} verdicts on {len(responses)} responses")
    return [_result(verdict, response) for verdict, response in zip(verdicts, responses, strict=True)]


def _result(verdict: Any, response: str) -> RewardResult:
    score = verdict.get("score") if isinstance(verdict, dict) else verdict
    if score is None or not isfinite(score := float(score)):
        raise ValueError(f"the reward function returned {str(verdict)[:100]}, not a finite score or a dict with one")
    return RewardResult(score, _is_correct(verdict, score), answer=_answer(verdict, response))


def _answer(verdict: Any, response: str) -> str | None:
    """Return the verdict's `pred`; else the answer read from the response."""
    if isinstance(verdict, dict) and "pred" in verdict:
        return None if verdict["pred"] is None else str(verdict["pred"])[-ANSWER_CHARS:]
    return answer_of(response)


def _is_correct(verdict: Any, score: float) -> bool:
    """Return the verdict's `correct`, or `acc` in verl's functions; else whether the score is above
    0."""
    if not isinstance(verdict, dict) or not verdict.keys() & {"correct", "acc"}:
        return score > 0
    if "correct" in verdict:
        return bool(verdict["correct"])
    accuracy = verdict["acc"]
    if accuracy is None or not isfinite(accuracy := float(accuracy)):
        raise ValueError(f"the reward function returned acc = {str(verdict['acc'])[:100]}, not a number")
    return accuracy > 0
