"""The forms of a reward function: it scores one response, all responses to a prompt, or a batch of any; and whether it
is a coroutine. Its parameters say which."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

from megatron_dapo.rewards.answers import ANSWER_CHARS, answer_of
from megatron_dapo.rewards.reward_result import RewardResult


class Scored(Enum):
    """What one call of a reward function scores; the values are its parameters."""

    ONE = "data_source, response, ground_truth, extra_info"
    GROUP = "data_source, responses, ground_truth, extra_info"
    BATCH = "data_sources, responses, ground_truths, extra_infos"


@dataclass(frozen=True)
class RewardForm:
    """How a reward function is called. is_async: its call is awaited, and others go on meanwhile."""

    scored: Scored
    is_async: bool


class RewardRequest(NamedTuple):
    """What a reward function is asked about one response."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: dict[str, Any]


def form_of(function: Callable[..., Any]) -> RewardForm:
    """Return a function's form: `responses` is the name of the second parameter where it takes several, and
    `ground_truths` that of the third where they are of several prompts."""
    names = [*inspect.signature(function).parameters, "", "", ""]
    scored = Scored.ONE
    if names[1] == "responses":
        scored = Scored.BATCH if names[2] == "ground_truths" else Scored.GROUP
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return RewardForm(scored, is_async)


def arguments_of(scored: Scored, requests: Sequence[RewardRequest]) -> tuple[Any, ...]:
    """Return the four positional arguments for these requests: one of `Scored.ONE`, those of one prompt of
    `Scored.GROUP`."""
    if scored is Scored.ONE:
        return tuple(*requests)
    columns = [list(column) for column in zip(*requests, strict=True)]
    if scored is Scored.BATCH:
        return tuple(columns)
    (data_source, *_), responses, (ground_truth, *_), (extra_info, *_) = columns
    return data_source, responses, ground_truth, extra_info


def results_of(scored: Scored, returned: Any, responses: Sequence[str]) -> list[RewardResult]:
    """Return what a function returned as a result per response. Raises ValueError for what is no verdict, or where
    there are not as many as responses."""
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
    """Return what the verdict says that the response answers, as `pred`; else what we read in the response."""
    if isinstance(verdict, dict) and "pred" in verdict:
        return None if verdict["pred"] is None else str(verdict["pred"])[-ANSWER_CHARS:]
    return answer_of(response)


def _is_correct(verdict: Any, score: float) -> bool:
    """Return what the verdict says, as `correct` or, as verl's functions do, `acc`; else whether the score is above
    0."""
    if not isinstance(verdict, dict) or not verdict.keys() & {"correct", "acc"}:
        return score > 0
    if "correct" in verdict:
        return bool(verdict["correct"])
    accuracy = verdict["acc"]
    if accuracy is None or not isfinite(accuracy := float(accuracy)):
        raise ValueError(f"the reward function returned acc = {str(verdict['acc'])[:100]}, not a number")
    return accuracy > 0
