"""The reward pool: worker processes with hard limits. One bad response costs one sample, never the
run.

Every worker holds one request at a time, or many for a coroutine. At the deadline it is killed and
replaced; the sample gets the function's score of a wrong answer, with the reason.
"""

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

from megatron_dapo.rewards.batches import Batches
from megatron_dapo.rewards.forms import RewardRequest, Scored
from megatron_dapo.rewards.reward_registry import check_reward, wrong_score
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rewards.shared_workers import SharedWorkers
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
        max_concurrency: int = 256,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        """Prepare the workers; `start` starts them.

        Args:
            function: a built-in name or package.module:function.
            kwargs: its keyword arguments.
            num_workers: processes.
            timeout_s: hard limit of one call, from the moment a worker takes it.
            memory_limit_mb: address space of a worker.
            pass_env: environment variables for workers that look like secrets.
            data_sources: of the prompts, for the functions that by_data_source loads ahead.
            allow_unsandboxed: run programs of the model without a sandbox if none can be made.
            max_concurrency: running calls of a coroutine, in all processes together.
            batch_size: the most responses per call of a function that takes a batch.
            seed: seeds, with the responses, Python's and numpy's random generators before each call
                of a plain function, not of a coroutine.
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
            "seed": seed,
        }
        variables = worker_environment(os.environ, pass_env, "reward.pass_env")
        self._pool = WorkerPool(
            "megatron_dapo.rewards.reward_worker", settings, variables, num_workers, _REQUESTS_PER_WORKER
        )
        self._num_workers = num_workers
        self._max_concurrency = max_concurrency
        self._calls = asyncio.Semaphore(max_concurrency)
        self._shared: SharedWorkers | None = None
        self._scored = Scored.ONE
        self._batches = Batches(self._ask, num_workers, batch_size)
        self._counts = dict.fromkeys(("num_scored", "num_timeouts", "num_crashes", "num_exceptions"), 0)
        self._logged: set[str] = set()
        self.wrong_score = 0.0  # of a function by import path
        self.last_traceback = ""  # of the function's last exception

    async def start(self) -> None:
        """Start the workers. Raises UserError for an unusable function, WorkerLost if a worker does
        not start."""
        check_reward(self._function, self._kwargs)
        await self._pool.start()
        greeting = self._pool.greeting
        self.wrong_score = float(greeting["wrong_score"])
        self._scored = Scored[greeting["scored"]]
        if greeting["is_async"]:
            self._shared = SharedWorkers(self._pool, self._num_workers)
            self._batches.num_calls = self._max_concurrency

    @property
    def scores_groups(self) -> bool:
        """Return whether the function scores all responses to a prompt in one call:
        `score_group`."""
        return self._scored is Scored.GROUP

    async def score(
        self, data_source: str, response: str, ground_truth: str, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        """Return the verdict on a response. The arguments are the reward function's own.

        Never raises because of a response: timeout, crash and exception come back as `error`,
        counted. Raises RuntimeError outside start() ... close().
        """
        request = RewardRequest(data_source, response, ground_truth, extra_info or {})
        if self._scored is Scored.BATCH:
            return self._results([request], [await self._batches.reply(request)])[0]
        return self._results([request], _one_by_one(await self._ask([request]), 1))[0]

    async def score_group(
        self, data_source: str, responses: Sequence[str], ground_truth: str, extra_info: dict[str, Any] | None = None
    ) -> list[RewardResult]:
        """Return the verdicts on all responses to a prompt; as `score`. An error is that of all of
        them."""
        requests = [RewardRequest(data_source, response, ground_truth, extra_info or {}) for response in responses]
        return self._results(requests, _one_by_one(await self._ask(requests), len(requests)))

    async def _ask(self, requests: Sequence[RewardRequest]) -> dict[str, Any]:
        """Return a worker's reply to one call: {"verdicts": ...}, one per request, or {"error":
        ...}."""
        message = {"requests": [tuple(request) for request in requests]}
        try:
            if self._shared is not None:
                async with self._calls:
                    reply = await self._shared.ask(message, self._timeout_s)
                return reply if _is_reply(reply, len(requests)) else {"error": _NO_VERDICT}
            async with self._pool.worker() as worker:
                reply = await worker.ask(message, self._timeout_s)
                if not _is_reply(reply, len(requests)):
                    worker.distrust()
                    reply = {"error": _NO_VERDICT}
                return reply
        except TimeoutError:
            return {"error": "timeout"}
        except WorkerLost as error:
            logger.warning("a reward worker is lost: %s", error)
            return {"error": "crash"}

    async def close(self) -> None:
        """End all workers; requests in flight come back as crashes. Idempotent."""
        await self._pool.close()
        await self._batches.close()

    def stats(self) -> dict[str, int]:
        """Return num_scored (all requests answered), num_timeouts, num_crashes, num_exceptions
        since the start."""
        return dict(self._counts)

    def _results(self, requests: Sequence[RewardRequest], replies: Sequence[dict[str, Any]]) -> list[RewardResult]:
        pairs = zip(requests, replies, strict=True)
        return [self._result(request.data_source, reply) for request, reply in pairs]

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
        wrong = wrong_score(self._function, data_source, self.wrong_score)
        return RewardResult(wrong, correct=False, error=error)


def _one_by_one(reply: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Split the reply to a call into one per response."""
    return [reply] * number if "error" in reply else reply["verdicts"]


def _is_reply(reply: dict[str, Any], number: int) -> bool:
    """Return whether it is a reply of rewards/reward_worker.py, which also runs the user's code."""
    if "error" in reply:
        return isinstance(reply["error"], str) and reply["error"].partition(":")[0] in _COUNTS
    verdicts = reply.get("verdicts")
    return isinstance(verdicts, list) and len(verdicts) == number and all(map(_is_verdict, verdicts))


def _is_verdict(verdict: Any) -> bool:
    if not isinstance(verdict, dict):
        return False
    score = verdict.get("score")
    correct = verdict.get("correct")
    is_sound = isinstance(score, float) and math.isfinite(score) and isinstance(correct, bool)
    return is_sound and isinstance(verdict.get("answer", 0), str | None)
