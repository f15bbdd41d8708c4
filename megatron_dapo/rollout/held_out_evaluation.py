"""The held-out evaluation of a run beside training's sampling, by one weight version.

Answers are kept.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from megatron_dapo.common.files import write_whole
from megatron_dapo.common.rollout_errors import NeedsSync
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rollout.answer_records import answer_record, line_of
from megatron_dapo.rollout.deadlines import within
from megatron_dapo.rollout.evaluation import sample_answers, validation_metrics
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # between two looks for a server with the weights


class Validation:
    """The answers to the held-out prompts: `begin` asks for them, `end` waits for them.

    In between training's requests go on, at the same servers. If no server has the weights, it
    waits for a push until `end` is called. `end` then raises NeedsSync, and goes on at its next
    call.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: Config,
        sampler: Sampler,
        servers: ServerPool,
        rewards: RewardPool,
        tokenizer: Tokenizer,
    ) -> None:
        self._prompts = prompts
        self._config = config
        self._sampler = sampler
        self._servers = servers
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._folder = RunFolder.of(config.trainer)
        self._step: int | None = None  # of the present answers
        self._records: list[dict] = []
        self._began = 0.0
        self._task: asyncio.Task | None = None
        self._is_waited_for = False  # by `end`

    def begin(self, step: int, weight_version: int, overdue: Callable[[], str]) -> None:
        """Ask for the answers of weight_version. overdue: makes the message at the deadline."""
        if self._step != step:
            self._step = step
            self._records = []
            self._began = time.monotonic()
        self._is_waited_for = False
        self._task = asyncio.create_task(self._answers_in_time(step, weight_version, overdue))

    async def end(self, step: int, weight_version: int, overdue: Callable[[], str]) -> dict[str, float]:
        """Return the metrics once all answers are there and kept; begin if `begin` was not called.

        Raises NeedsSync, RolloutError, UserError.
        """
        if self._task is None:
            self.begin(step, weight_version, overdue)
        assert self._task is not None and self._step == step, "one evaluation at a time"
        self._is_waited_for = True
        try:
            metrics = await self._task
            self._step = None
            return metrics
        finally:
            self._task = None

    async def cancel(self) -> None:
        """End all requests; their answers are not kept."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _answers_in_time(self, step: int, weight_version: int, overdue: Callable[[], str]) -> dict[str, float]:
        timeout_s = self._config.actor_rollout_ref.rollout.step_timeout_s
        return await within(timeout_s, self._answers(step, weight_version), overdue)

    async def _answers(self, step: int, weight_version: int) -> dict[str, float]:
        await self._servers.expect(weight_version)

        def keep(group: Group, sample: Sample) -> None:
            self._records.append(answer_record(step, group, sample, self._tokenizer))

        await sample_answers(
            self._sampler, self._prompts, self._config, self._rewards, step, keep, self._records, self._wait_for_weights
        )
        seconds = time.monotonic() - self._began
        records = self._records
        # training's requests go on meanwhile
        metrics = await asyncio.to_thread(self._keep, step, records)
        return {**metrics, "val/seconds": seconds}

    async def _wait_for_weights(self, reason: NeedsSync) -> None:
        """Wait a while for a push. Raises the reason to a waiting caller, who can see to a push."""
        if self._is_waited_for:
            raise reason
        await asyncio.sleep(_LOOK_S)

    def _keep(self, step: int, records: Sequence[dict]) -> dict[str, float]:
        """Write the answers, and return the metrics."""
        path = self._folder.validation(step)
        ordered = sorted(records, key=lambda record: (record["prompt_index"], record["number"]))
        try:
            write_whole(path, b"".join(map(line_of, ordered)))
        except OSError as error:  # only people read them: no reason to end a run
            log.warning("the answers of step %d cannot be kept in %s (%s)", step, path, error)
        return validation_metrics(ordered)
