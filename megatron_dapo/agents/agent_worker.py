"""One process of rollout functions: `python -m megatron_dapo.agents.agent_worker`.

Started, watched and killed by the agent pool. The settings are answered by {} or {"user_error":
...}, then each {"task": ..., "endpoint": ...}, a trajectory, by an outcome.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import import_attribute
from megatron_dapo.rewards.import_ahead import import_ahead
from megatron_dapo.rewards.worker_process import AsyncAnswer, Message, serve

_KEY = "actor_rollout_ref.rollout.agent.function"


def _load(path: str, kwargs: dict[str, Any]) -> Callable[..., Awaitable[Outcome]]:
    """Return the function. Raises UserError if it cannot be imported or called."""
    function = import_attribute(_KEY, path, "package.module:function")
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"{_KEY}: {path} is no async function; write async def rollout(task, model).")
    try:
        inspect.signature(function).bind(None, None, **kwargs)
    except TypeError as error:
        raise UserError(
            f"{_KEY}: {path} cannot be called with a task, a model and agent.kwargs {kwargs} ({error}); correct them."
        ) from error
    import_ahead(path)
    return function


def _get_ready(settings: Message) -> tuple[Message, AsyncAnswer]:
    """Return the greeting, and the function that answers a request."""
    try:
        function = _load(settings["function"], settings["kwargs"])
    except UserError as error:
        return {"user_error": error.sentences}, partial(_answer, None, {})
    return {}, partial(_answer, function, settings["kwargs"])


async def _answer(
    function: Callable[..., Awaitable[Outcome]] | None, kwargs: dict[str, Any], message: Message
) -> Message:
    assert function is not None, "the pool ends when the settings are refused"
    try:
        outcome = await function(AgentTask(**message["task"]), Endpoint.from_dict(message["endpoint"]), **kwargs)
    except (TimeoutError, asyncio.CancelledError) as error:
        if cast(asyncio.Task, asyncio.current_task()).cancelling():
            raise
        raise RuntimeError(f"the function ended by its own {error!r}") from error
    if not isinstance(outcome, Outcome):
        raise TypeError(f"a rollout function returns an Outcome, not {type(outcome).__name__}")
    return {"outcome": vars(outcome_of(vars(outcome)))}  # plain values


if __name__ == "__main__":
    serve(_get_ready)
