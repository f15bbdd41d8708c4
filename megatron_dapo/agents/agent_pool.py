"""The agent pool: runs the agent of each trajectory, a function in shared workers or a command."""

import logging
import os
from dataclasses import asdict
from logging.handlers import RotatingFileHandler
from pathlib import Path

from megatron_dapo.agents.command_agent import PASS_ENV, CommandAgent
from megatron_dapo.agents.command_process import GRACE_S, Ended
from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.common.bounded import parse_json
from megatron_dapo.config.schema.agent import AgentConfig
from megatron_dapo.rewards.shared_workers import SharedWorkers
from megatron_dapo.rewards.worker_environment import worker_environment
from megatron_dapo.rewards.worker_pool import WorkerLost, WorkerPool

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
        self._command = CommandAgent(keys) if keys.command else None
        self._is_sandboxed = keys.sandbox
        self._pool = WorkerPool(
            "megatron_dapo.agents.agent_worker",
            {"function": keys.function, "kwargs": keys.kwargs, "memory_limit_mb": None},
            worker_environment(os.environ, keys.pass_env, PASS_ENV),
            keys.num_workers,
        )
        self._workers = SharedWorkers(self._pool, keys.num_workers, cancel_s=GRACE_S)
        self._outputs = RotatingFileHandler(
            logs / "agents.log", maxBytes=_MAX_LOG_BYTES, backupCount=1, errors="replace", delay=True
        )
        self._logged: set[str] = set()

    async def start(self) -> None:
        """Start the workers, or look for the program. Raises UserError for an unusable function or
        command, WorkerLost if a worker does not start."""
        await (self._command.start() if self._command else self._pool.start())

    async def run(self, task: AgentTask, endpoint: Endpoint, timeout_s: float) -> Outcome:
        """Run the agent of a trajectory, and return its outcome.

        Past timeout_s, which may be infinite, or cancelled, it has `GRACE_S` for its `finally`.
        Then it is killed: a command with its descendants, a function with its whole worker, whose
        other trajectories fail.

        Raises AgentFailure.
        """
        try:
            if self._command is not None:
                return self._judged(task, await self._command.run(task, endpoint, timeout_s))
            message = {"task": asdict(task), "endpoint": endpoint.as_dict()}
            reply = await self._workers.ask_once(message, timeout_s)
            if "outcome" in reply:
                return outcome_of(reply["outcome"])
        except TimeoutError:
            raise AgentFailure("timeout") from None
        except WorkerLost as error:
            raise AgentFailure(f"crash: {error}") from error
        except (OSError, ValueError) as error:
            raise AgentFailure(f"exception: {getattr(error, 'strerror', None) or error}") from error
        reason = reply["error"]
        if "traceback" in reply and reason not in self._logged and len(self._logged) < _MAX_LOGGED_ERRORS:
            self._logged.add(reason)
            logger.warning("a rollout function failed:\n%s", reply["traceback"])
        raise AgentFailure(reason)

    async def close(self) -> None:
        """End all workers; their trajectories fail. Idempotent."""
        await self._pool.close()
        self._outputs.close()

    def _judged(self, task: AgentTask, ended: Ended) -> Outcome:
        """Log a command's output, and return its outcome. Raises AgentFailure, ValueError."""
        text = f"== {task.data_source} {task.number}: exit code {ended.exit_code}\n{ended.output}"
        self._outputs.emit(logging.makeLogRecord({"msg": text}))
        if ended.exit_code:
            last_words = (ended.output.strip() or "it wrote nothing").splitlines()[-1]
            raise AgentFailure(f"crash: exit code {ended.exit_code}: {last_words[:200]}")
        try:
            outcome = outcome_of(parse_json(ended.result)) if ended.result else Outcome()
        except ValueError as error:
            raise ValueError(f"its result file: {error}") from error
        if self._is_sandboxed and outcome.reward is not None:
            raise ValueError(
                "a reward from within the sandbox, where the model's tools could have written it; give an answer for "
                "reward.function, or set rollout.agent.sandbox=false"
            )
        return outcome
