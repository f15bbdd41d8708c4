"""One environment process: `python -m megatron_dapo.envs.environment_worker`.

Started, watched and killed by the environment pool.

The settings are answered by {} or {"user_error": ...}. Then per trajectory {"reset": task, "seed":
of the random generators}, {"step": text} ..., each answered by an observation, and {"close": true}.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_dapo.common.seeds import seed_generators
from megatron_dapo.config.built_ins import BUILT_IN_ENVIRONMENTS
from megatron_dapo.envs.environment import Environment, Observation, Task
from megatron_dapo.envs.environment_registry import make
from megatron_dapo.rewards.import_ahead import import_ahead
from megatron_dapo.rewards.worker_process import Message, serve


def _get_ready(settings: Message) -> tuple[Message, Callable[[Message], Message]]:
    """Return the greeting, and the function that answers a request. Raises UserError."""
    name: str = settings["environment"]
    make(name, settings["kwargs"])
    import_ahead(BUILT_IN_ENVIRONMENTS.get(name, name))
    return {}, _EnvironmentHost(name, settings["kwargs"]).answer


class _EnvironmentHost:
    """The host of one trajectory's environment after the other."""

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        self._name = name
        self._kwargs = kwargs
        self._environment: Environment | None = None
        self._loop = asyncio.new_event_loop()

    def answer(self, message: Message) -> Message:
        """Answer a request of the pool."""
        environment = self._environment
        if "step" in message:
            assert environment is not None, "a trajectory begins with reset"
            return _plain(self._loop.run_until_complete(environment.step(message["step"])))
        self._environment = None
        if environment is not None:
            self._loop.run_until_complete(environment.close())
        if "reset" not in message:
            return {}
        seed_generators(message["seed"])
        self._environment = make(self._name, self._kwargs)
        return _plain(self._loop.run_until_complete(self._environment.reset(Task(**message["reset"]))))


def _plain(observation: Observation) -> Message:
    """Return an observation as plain data. Raises TypeError for any other object."""
    if not isinstance(observation, Observation):
        raise TypeError(f"an environment answers with an Observation, not {type(observation).__name__}")
    return {
        "messages": observation.messages,
        "done": bool(observation.done),
        "reward": None if observation.reward is None else float(observation.reward),
        "correct": None if observation.correct is None else bool(observation.correct),
    }


if __name__ == "__main__":
    serve(_get_ready)
