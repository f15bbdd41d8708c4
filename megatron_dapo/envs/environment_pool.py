"""The environment pool: worker processes with hard limits. A stuck environment costs one
trajectory, never the run."""

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megatron_dapo.envs.environment import Observation, Task
from megatron_dapo.envs.environment_registry import check_environment
from megatron_dapo.rewards.worker_environment import worker_environment
from megatron_dapo.rewards.worker_pool import Worker, WorkerLost, WorkerPool

_MAX_LOGGED_FAILURES = 20
_NO_OBSERVATION = "crash: the worker's answer is no observation; the class may have replaced parts of its modules"

logger = logging.getLogger(__name__)


class EnvironmentFailure(Exception):
    """The environment of one trajectory did not answer. reason: "timeout", "crash" or "exception:
    ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EnvironmentPool:
    """The processes that host environments, each that of one trajectory at a time."""

    def __init__(
        self,
        environment: str,
        kwargs: dict[str, Any],
        num_workers: int,
        step_timeout_s: float,
        memory_limit_mb: int,
        pass_env: Sequence[str] = (),
    ) -> None:
        """Prepare the workers; `start` starts them.

        Args:
            environment: a built-in name or package.module:Class.
            kwargs: its keyword arguments.
            num_workers: processes.
            step_timeout_s: hard limit of one reset, step or close.
            memory_limit_mb: address space of a worker.
            pass_env: names of environment variables that workers get though they look like secrets.
        """
        self._environment = environment
        self._step_timeout_s = step_timeout_s
        settings = {
            "environment": environment,
            "kwargs": kwargs,
            "memory_limit_mb": memory_limit_mb,
        }
        self._pool = WorkerPool(
            "megatron_dapo.envs.environment_worker",
            settings,
            worker_environment(os.environ, pass_env, "actor_rollout_ref.rollout.multi_turn.pass_env"),
            num_workers,
            closing={"close": True},
            closing_timeout_s=step_timeout_s,
        )
        self._logged: set[str] = set()

    async def start(self) -> None:
        """Start the workers. Raises UserError for an unusable environment, WorkerLost if one does
        not start."""
        check_environment(self._environment)
        await self._pool.start()

    @asynccontextmanager
    async def session(self, seed: int = 0) -> AsyncIterator["EnvironmentSession"]:
        """Lend an environment for one trajectory; wait until a worker is free.

        At the end it is closed, or killed and replaced if it is still answering; the caller does
        not wait for that.

        Args:
            seed: of Python's and numpy's random generators in its process, from `reset` on.

        Raises:
            EnvironmentFailure: if the worker ended.
        """
        try:
            async with self._pool.worker() as worker:
                yield EnvironmentSession(worker, self._step_timeout_s, seed)
        except WorkerLost as error:
            self._log("crash", error)
            raise EnvironmentFailure("crash") from error
        except EnvironmentFailure as error:
            self._log(error.reason, error)
            raise

    async def close(self) -> None:
        """End all workers; sessions in use fail with "crash". Idempotent."""
        await self._pool.close()

    def _log(self, reason: str, error: Exception) -> None:
        if reason not in self._logged and len(self._logged) < _MAX_LOGGED_FAILURES:
            self._logged.add(reason)
            logger.warning("environment %s failed: %s", self._environment, error)


class EnvironmentSession:
    """The environment of one trajectory, in its worker. Calls raise EnvironmentFailure or
    WorkerLost."""

    def __init__(self, worker: Worker, timeout_s: float, seed: int) -> None:
        self._worker = worker
        self._timeout_s = timeout_s
        self._seed = seed

    async def reset(self, task: Task) -> Observation:
        """Begin; return the environment's first words."""
        return await self._ask({"reset": vars(task), "seed": self._seed})

    async def step(self, response: str) -> Observation:
        """Return the answer to a turn of the model."""
        return await self._ask({"step": response})

    async def _ask(self, message: dict[str, Any]) -> Observation:
        try:
            reply = await self._worker.ask(message, self._timeout_s)
        except TimeoutError:
            raise EnvironmentFailure("timeout") from None
        if "error" in reply:
            raise EnvironmentFailure(reply["error"])
        try:
            return Observation(**{**reply, "messages": tuple(reply["messages"])})
        except (KeyError, TypeError, ValueError):
            self._worker.distrust()
            raise EnvironmentFailure(_NO_OBSERVATION) from None
