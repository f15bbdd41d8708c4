"""The agent pool: worker processes that run the agents of trajectories, functions or commands."""

import logging
import os
from dataclasses import asdict
from logging.handlers import RotatingFileHandler
from pathlib import Path

from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.config.schema.agent import AgentConfig
from megatron_dapo.rewards.shared_workers import SharedWorkers
from megatron_dapo.rewards.worker_environment import worker_environment
from megatron_dapo.rewards.worker_pool import WorkerLost, WorkerPool

_GRACE_S = 10.0  # for a cancelled agent to end by itself; then it is killed
_KILL_S = 20.0  # for a command's end; a worker that does not answer then is killed
END_S = _GRACE_S + _KILL_S
"""Most time that the end of all agents takes."""
_MAX_LOGGED_ERRORS = 20
_MAX_LOG_BYTES = 16 << 20

logger = logging.getLogger(__name__)


class AgentFailure(Exception):
    """The agent of one trajectory failed. reason: "timeout", "crash: ..." or "exception: ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AgentPool:
    """The agents of a run. Its caller bounds the number of trajectories under way."""

    def __init__(self, keys: AgentConfig, logs: Path) -> None:
        """Prepare; `start` starts it. Raises UserError for an unset name of `pass_env`.

        logs: folder of `agents.log`, the commands' outputs; 32 MiB at most, the newest.
        """
        settings = keys.model_dump(include={"function", "kwargs", "command", "sandbox", "pass_env"})
        settings |= {"grace_s": _GRACE_S, "memory_limit_mb": None}
        variables = worker_environment(os.environ, keys.pass_env, "actor_rollout_ref.rollout.agent.pass_env")
        self._pool = WorkerPool("megatron_dapo.agents.agent_worker", settings, variables, keys.num_workers)
        cancel_s = _GRACE_S + _KILL_S if keys.command else _GRACE_S
        self._workers = SharedWorkers(self._pool, keys.num_workers, cancel_s)
        self._outputs = RotatingFileHandler(
            logs / "agents.log", maxBytes=_MAX_LOG_BYTES, backupCount=1, errors="replace", delay=True
        )
        self._logged: set[str] = set()

    async def start(self) -> None:
        """Start the workers. Raises UserError for an unusable function or command, WorkerLost if one
        does not start."""
        await self._pool.start()

    async def run(self, task: AgentTask, endpoint: Endpoint, timeout_s: float) -> Outcome:
        """Run the agent of a trajectory, and return its outcome.

        Past timeout_s, which may be infinite, or cancelled, it has 10 s for its `finally`. Then it is
        killed: a command with its descendants, a function with its whole worker, whose other
        trajectories fail.

        Raises AgentFailure.
        """
        try:
            reply = await self._workers.ask_once({"task": asdict(task), "endpoint": endpoint.as_dict()}, timeout_s)
            if output := reply.get("output"):
                record = {"msg": f"== {task.data_source} {task.number}\n{output}"}
                self._outputs.emit(logging.makeLogRecord(record))
            if "outcome" in reply:
                return outcome_of(reply["outcome"])
        except TimeoutError:
            raise AgentFailure("timeout") from None
        except (WorkerLost, ValueError) as error:  # ValueError: the function replaced parts of its worker
            raise AgentFailure(f"crash: {error}") from error
        reason = reply["error"]
        if reason not in self._logged and len(self._logged) < _MAX_LOGGED_ERRORS:
            self._logged.add(reason)
            logger.warning("an agent failed: %s\n%s", reason, reply.get("traceback", ""))
        raise AgentFailure(reason)

    async def close(self) -> None:
        """End all workers; their trajectories fail. Idempotent."""
        await self._pool.close()
        self._outputs.close()
