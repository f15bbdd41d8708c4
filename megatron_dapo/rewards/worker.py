"""One reward process: `python -m megatron_dapo.rewards.worker`. Started, watched and killed by the reward pool.

The settings are answered by {"wrong_score": ...} or {"user_error": ...}, a response by {"score": ..., "correct": ...,
"answer": ...}.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.built_ins import BUILT_IN_REWARDS, BY_DATA_SOURCE
from megatron_dapo.rewards.code.sandbox import SETTINGS
from megatron_dapo.rewards.import_ahead import import_ahead
from megatron_dapo.rewards.registry import WRONG_SCORES, check_signature, function_name, load, score_response
from megatron_dapo.rewards.worker_process import Message, serve

_SHARE_FOR_TESTS = 0.8  # of the deadline; the rest is for the judge


def get_ready(settings: Message) -> tuple[Message, Callable[[Message], Message]]:
    """Return the greeting, and the function that answers a request."""
    function = settings["function"]
    kwargs = settings["kwargs"]
    try:
        wrong_score = _checked_wrong_score(function, kwargs)
        names = {function_name(function, source) for source in settings["data_sources"]} or {function}
        for name in names:
            _load_ahead(name)
        if "code_tests" in names:
            SETTINGS.time_limit_s = _SHARE_FOR_TESTS * settings["timeout_s"]
            SETTINGS.choose(settings["allow_unsandboxed"])
        greeting: Message = {"wrong_score": wrong_score}
    except UserError as error:
        greeting = {"user_error": error.sentences}
    return greeting, partial(_answer, function, kwargs)


def _load_ahead(function: str) -> None:
    """Import what the function needs before the first response, whose deadline is not for that."""
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


def _answer(function: str, kwargs: dict[str, Any], message: Message) -> Message:
    result = score_response(function, kwargs, **message)
    return {"score": result.score, "correct": result.correct, "answer": result.answer}


if __name__ == "__main__":
    serve(get_ready)
