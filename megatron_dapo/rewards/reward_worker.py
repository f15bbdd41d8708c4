"""One reward process: `python -m megatron_dapo.rewards.reward_worker`. Started, watched and killed
by the reward pool.

The settings are answered by {"wrong_score": ..., "scored": ..., "is_async": ...} or {"user_error":
...}, a request by {"verdicts": [{"score": ..., "correct": ..., "answer": ...}, ...]}, one per
response.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_dapo.common.seeds import seed_from, seed_generators
from megatron_dapo.config.built_ins import BUILT_IN_REWARDS, BY_DATA_SOURCE
from megatron_dapo.rewards.code.sandbox import SETTINGS
from megatron_dapo.rewards.forms import RewardRequest
from megatron_dapo.rewards.import_ahead import import_ahead
from megatron_dapo.rewards.reward_registry import (
    WRONG_SCORES,
    check_signature,
    form_of_name,
    function_name,
    load,
    score_responses,
    score_responses_async,
)
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rewards.worker_process import Answer, AsyncAnswer, Message, serve

_SHARE_FOR_TESTS = 0.8  # of the deadline; the rest is for the judge


def _get_ready(settings: Message) -> tuple[Message, Answer | AsyncAnswer]:
    """Return the greeting, and the function that answers a request. Raises UserError."""
    function = settings["function"]
    kwargs = settings["kwargs"]
    wrong_score = _checked_wrong_score(function, kwargs)
    names = {function_name(function, source) for source in settings["data_sources"]} or {function}
    for name in names:
        _load_ahead(name)
    if "code_tests" in names:
        SETTINGS.time_limit_s = _SHARE_FOR_TESTS * settings["timeout_s"]
        SETTINGS.choose(settings["allow_unsandboxed"])
    form = form_of_name(function)
    greeting = {"wrong_score": wrong_score, "scored": form.scored.name, "is_async": form.is_async}
    if form.is_async:
        return greeting, partial(_answer_async, function, kwargs)
    return greeting, partial(_answer, function, kwargs, settings["seed"])


def _load_ahead(function: str) -> None:
    """Import the function's modules before the first response, outside its deadline."""
    if function != BY_DATA_SOURCE:
        load(function)
        import_ahead(BUILT_IN_REWARDS.get(function, function))


def _checked_wrong_score(function: str, kwargs: dict[str, Any]) -> float:
    """Return the score of a wrong answer. Raises UserError for a function that cannot be called."""
    if function == BY_DATA_SOURCE:
        return 0.0
    check_signature(function, kwargs)
    if function in BUILT_IN_REWARDS:
        return WRONG_SCORES[function]
    return float(getattr(load(function), "wrong_score", 0.0))


def _answer(function: str, kwargs: dict[str, Any], seed: int, message: Message) -> Message:
    # depends on the request only, not on its worker
    seed_generators(seed_from(seed, repr(message)))
    return _verdicts(score_responses(function, kwargs, _requests(message)))


async def _answer_async(function: str, kwargs: dict[str, Any], message: Message) -> Message:
    return _verdicts(await score_responses_async(function, kwargs, _requests(message)))


def _requests(message: Message) -> list[RewardRequest]:
    return [RewardRequest(*request) for request in message["requests"]]


def _verdicts(results: Sequence[RewardResult]) -> Message:
    verdicts = [{"score": each.score, "correct": each.correct, "answer": each.answer} for each in results]
    return {"verdicts": verdicts}


if __name__ == "__main__":
    serve(_get_ready)
