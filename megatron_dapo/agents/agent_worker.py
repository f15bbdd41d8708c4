"""One process of agents: `python -m megatron_dapo.agents.agent_worker`.

Started, watched and killed by the agent pool. Each {"task": ..., "endpoint": ...}, a trajectory, is
answered by {"outcome": ...} or {"error": ...}. Commands are started here, since each start of a
process stops its caller for a moment.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from megatron_dapo.agents.command_agent import CommandAgent
from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import import_attribute
from megatron_dapo.rewards.import_ahead import import_ahead
from megatron_dapo.rewards.worker_process import AsyncAnswer, Message, serve

_KEY = "actor_rollout_ref.rollout.agent.function"

Play = Callable[[AgentTask, Endpoint], Awaitable[Message]]


def _get_ready(settings: Message) -> tuple[Message, AsyncAnswer]:
    """Return the greeting, and the function that answers a request. Raises UserError."""
    if not settings["command"]:
        return {}, partial(_answer, _function(settings["function"], settings["kwargs"]))
    agent = CommandAgent(settings["command"], settings["sandbox"], settings["pass_env"], settings["grace_s"])
    asyncio.run(agent.start())
    return {}, partial(_answer, agent.run)


def _function(path: str, kwargs: dict[str, Any]) -> Play:
    """Return the runner of the function. Raises UserError if it cannot be imported or called."""
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

    async def play(task: AgentTask, model: Endpoint) -> Message:
        outcome = await function(task, model, **kwargs)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"a rollout function returns an Outcome, not {type(outcome).__name__}")
        return {"outcome": vars(outcome_of(vars(outcome)))}  # plain values

    return play


async def _answer(play: Play, message: Message) -> Message:
    try:
        return await play(AgentTask(**message["task"]), Endpoint.from_dict(message["endpoint"]))
    except (TimeoutError, asyncio.CancelledError) as error:
        if cast(asyncio.Task, asyncio.current_task()).cancelling():
            raise
        raise RuntimeError(f"the function ended by its own {error!r}") from error


if __name__ == "__main__":
    serve(_get_ready)
