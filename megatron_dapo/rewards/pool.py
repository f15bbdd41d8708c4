"""The reward pool: worker processes with hard limits. One bad response costs one sample, never the run.

Every worker holds one request at a time. At the deadline it is killed and replaced; the sample gets the function's
score of a wrong answer and says why.
"""

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

from megatron_dapo.rewards.registry import check_reward, wrong_score
from megatron_dapo.rewards.types import RewardResult
from megatron_dapo.rewards.worker_environment import worker_environment
from megatron_dapo.rewards.worker_pool import WorkerLost, WorkerPool

_REQUESTS_PER_WORKER = 1000  # then a fresh process: sympy's caches grow
_MAX_LOGGED_ERRORS = 20
_NO_VERDICT = "crash: the worker's answer is no verdict; the function may have replaced parts of its modules"
_COUNTS = {"timeout": "num_timeouts", "crash": "num_crashes", "exception": "num_exceptions"}

logger = logging.getLogger(__name__)


class RewardPool:
    """The processes that score responses with the run's reward function."""

    def __init__(
        self,
        function: str,
        kwargs: dict[str, Any],
        num_workers: int,
        timeout_s: float,
        memory_limit_mb: int,
        pass_env: Sequence[str] = (),
        data_sources: Sequence[str] = (),
        allow_unsandboxed: bool = False,
    ) -> None:
        """Prepare the workers; `start` starts them.

        Args:
            function: a built-in name or package.module:function.
            kwargs: its keyword arguments.
            num_workers: processes.
            timeout_s: hard limit of one reward, from the moment a worker takes it.
            memory_limit_mb: address space of a worker.
            pass_env: names of environment variables that workers get though they look like secrets.
            data_sources: of the prompts, for what by_data_source loads ahead.
            allow_unsandboxed: run programs of the model without a sandbox where none can be made.
        """
        self._function = function
        self._kwargs = kwargs
        self._timeout_s = timeout_s
        settings = {
            "function": function,
            "kwargs": kwargs,
            "memory_limit_mb": memory_limit_mb,
            "data_sources": [*data_sources],
            "timeout_s": timeout_s,
            "allow_unsandboxed": allow_unsandboxed,
        }
        variables = worker_environment(os.environ, pass_env, "reward.pass_env")
        self._pool = WorkerPool("megatron_dapo.rewards.worker", settings, variables, num_workers, _REQUESTS_PER_WORKER)
        self._counts = dict.fromkeys(("num_scored", "num_timeouts", "num_crashes", "num_exceptions"), 0)
        self._logged: set[str] = set()
        self._wrong_score = 0.0
        self.last_traceback = ""  # of the function's last exception

    async def start(self) -> None:
        """Start the workers. Raises UserError for an unusable function, WorkerLost where a worker does not start."""
        check_reward(self._function, self._kwargs)
        await self._pool.start()
        self._wrong_score = float(self._pool.greeting["wrong_score"])

    async def score(
        self, data_source: str, response: str, ground_truth: str, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        """Return the verdict on a response. The arguments are the reward function's own.

        Never raises because of a response: timeout, crash and exception come back as `error`, counted. Raises
        RuntimeError outside start() ... close().
        """
        request = {
            "data_source": data_source,
            "response": response,
            "ground_truth": ground_truth,
            "extra_info": extra_info or {},
        }
        try:
            async with self._pool.worker() as worker:
                reply = await worker.ask(request, self._timeout_s)
                if not _is_verdict(reply):
                    worker.distrust()
                    reply = {"error": _NO_VERDICT}
        except TimeoutError:
            reply = {"error": "timeout"}
        except WorkerLost as error:
            logger.warning("a reward worker is lost: %s", error)
            reply = {"error": "crash"}
        return self._result(data_source, reply)

    async def close(self) -> None:
        """End all workers; requests in flight come back as crashes. Idempotent."""
        await self._pool.close()

    def stats(self) -> dict[str, int]:
        """Return num_scored (all requests answered), num_timeouts, num_crashes, num_exceptions since the start."""
        return dict(self._counts)

    def _result(self, data_source: str, reply: dict[str, Any]) -> RewardResult:
        self._counts["num_scored"] += 1
        error = reply.get("error")
        if error is None:
            return RewardResult(score=reply["score"], correct=reply["correct"], answer=reply["answer"])
        self._counts[_COUNTS[error.partition(":")[0]]] += 1
        self.last_traceback = str(reply.get("traceback", "")) or self.last_traceback
        if error not in self._logged and len(self._logged) < _MAX_LOGGED_ERRORS:
            self._logged.add(error)
            logger.warning("reward %s failed on a response to %r: %s", self._function, data_source, error)
        wrong = wrong_score(self._function, data_source, self._wrong_score)
        return RewardResult(wrong, correct=False, error=error)


def _is_verdict(reply: dict[str, Any]) -> bool:
    """Return whether it is what rewards/worker.py answers: also code of the user's runs in there."""
    if "error" in reply:
        return isinstance(reply["error"], str) and reply["error"].partition(":")[0] in _COUNTS
    score = reply.get("score")
    correct = reply.get("correct")
    is_sound = isinstance(score, float) and math.isfinite(score) and isinstance(correct, bool)
    return is_sound and isinstance(reply.get("answer", 0), str | None)
