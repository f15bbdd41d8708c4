"""The rollout controller: prompts -> servers -> rewards -> groups -> dynamic sampling -> finished batches.

One asyncio event loop, in a process of its own (handle.py), so that it never competes with training.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.derived import has_given_servers, uses_dynamic_sampling, uses_overlong_shaping
from megatron_dapo.config.schema import Config
from megatron_dapo.data.prompts import PromptCursor, PromptDataset, content_of
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.data.types import Group, Prompt, RolloutBatch
from megatron_dapo.envs.pool import EnvironmentPool
from megatron_dapo.huggingface.model_spec import read_vocab_size
from megatron_dapo.rewards.pool import RewardPool
from megatron_dapo.rewards.registry import check_reward
from megatron_dapo.rewards.shaping import OverlongShaping
from megatron_dapo.rollout.batch_files import write_batch
from megatron_dapo.rollout.client import SamplingParams, SGLangClient
from megatron_dapo.rollout.errors import Interrupted, NeedsSync, RolloutError
from megatron_dapo.rollout.evaluation import evaluate
from megatron_dapo.rollout.experience_replay import make_pool, next_prompts, replay_metrics
from megatron_dapo.rollout.group_filter import filter_in_words, make_queue
from megatron_dapo.rollout.records import group_record
from megatron_dapo.rollout.sampling import RetryPolicy, Sampler, run_all
from megatron_dapo.rollout.server_list import ServerList
from megatron_dapo.rollout.server_pool import ServerPool, ServerState
from megatron_dapo.rollout.server_watch import report_unresponsive
from megatron_dapo.rollout.step_metrics import step_metrics
from megatron_dapo.rollout.trajectory import MultiTurn, TurnLimits
from megatron_dapo.rollout.verdicts import VerdictCheck
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import given_server_key

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0  # between two looks at a server that is down
MAX_FUTILE_SYNCS = 3  # where no server has the weights after so many pushes, none ever will


class Controller:
    """The rollout of a run: prompts, servers, rewards and the queue of groups behind `next_batch` and `evaluate`.

    One call at a time. Make it with `Controller(config)` (reads data and tokenizer; raises UserError), then
    `await start()`. Once `stop_asked` is set, `next_batch` waits for no further group.
    """

    def __init__(self, config: Config) -> None:
        self.stop_asked = asyncio.Event()
        data = config.data
        rollout = config.actor_rollout_ref.rollout
        reward = config.reward
        if not has_given_servers(config):
            raise UserError("actor_rollout_ref.rollout.server_urls = []: give the URLs of running servers.")
        self._config = config
        self._rollout = rollout
        self._folder = RunFolder.of(config.trainer)
        tokenizer = load_tokenizer(ModelFolder.of(config.actor_rollout_ref.model.path).hf)
        self._tokenizer = tokenizer
        vocab_size = read_vocab_size(config.actor_rollout_ref.model.path)
        self._prompts = load_prompts(data.train_files, config, tokenizer)
        self._val_prompts = load_prompts(data.val_files, config, tokenizer) if data.val_files else []
        sources = {prompt.data_source for prompt in (*self._prompts, *self._val_prompts)}
        check_reward(reward.function, reward.kwargs, sorted(sources))
        self._cursor = PromptCursor(len(self._prompts), data.seed, data.shuffle, content_of(self._prompts))
        self._queue = make_queue(config)
        self._pool = make_pool(config)
        self._servers = ServerPool(
            ServerList.of_config(rollout),
            max_concurrency=rollout.max_concurrency,
            down_timeout_s=rollout.server.startup_timeout_s,
            probe_interval_s=PROBE_INTERVAL_S,
            connect=partial(SGLangClient, api_key=given_server_key(config)),
            report_unresponsive=partial(report_unresponsive, self._folder),
        )
        self._rewards = RewardPool(
            reward.function,
            reward.kwargs,
            reward.num_workers,
            reward.timeout_s,
            reward.memory_limit_mb,
            reward.pass_env,
            sorted(sources),
        )
        retry = RetryPolicy(rollout.request_timeout_s, rollout.max_retries)
        self._environments = make_environments(config)
        multi_turn: MultiTurn | None = None
        if self._environments is not None:
            multi_turn = MultiTurn(self._environments, tokenizer, data.apply_chat_template, turn_limits(config))
        greedy_baseline = config.algorithm.adv_estimator == "remax"
        self._sampler = Sampler(self._servers, self._rewards, tokenizer, retry, vocab_size, multi_turn, greedy_baseline)
        # a second one: its retries are not the step's
        self._val_sampler = Sampler(self._servers, self._rewards, tokenizer, retry, vocab_size, multi_turn)
        self._params = SamplingParams(
            max_new_tokens=data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=tuple(rollout.stop_token_ids),
        )
        self._shaping = make_shaping(config)
        self._seconds = 0.0  # spent in this step, also before a sync
        self._verdict_check: VerdictCheck | None = None  # of this step
        self._state_before_step: dict = {}
        self._num_futile_syncs = 0  # asked for since a server had the weights
        self._asked_for: set[str] = set()  # servers that came back in this step, for which a push was asked

    async def start(self) -> None:
        """Start the reward workers and wait for all servers. Raises UserError or RolloutError."""
        await self._rewards.start()
        if self._environments:
            await self._environments.start()
        await self._servers.start(self._rollout.server.startup_timeout_s)
        log.info("ready: %d servers, %d held-out prompts", len(self._servers.servers), len(self._val_prompts))

    async def next_batch(self, step: int, weight_version: int) -> RolloutBatch:
        """Return the groups of one rollout step, by servers that hold weight_version; surplus groups may be
        `max_staleness` versions older.

        With needs_sync in the answer: push the weights and call again with the same step; its groups and counts go on.
        Raises UserError where dynamic sampling is exhausted or too few responses got a verdict, RolloutError at
        `step_timeout_s` or when servers fail, Interrupted where it was asked to stop.
        """
        started = time.monotonic()
        if self._verdict_check is None:  # the step begins, it does not go on after a push
            self._verdict_check = self._begin_verdicts(f"rollout step {step}")
            self._state_before_step = self._drawing_state()
        self._queue.begin(step, weight_version)
        try:
            await within(
                self._rollout.step_timeout_s,
                unless(self.stop_asked, self._fill(weight_version), f"rollout step {step} was asked to stop"),
                lambda: self._overdue(f"rollout step {step}", self._missing_groups()),
            )
        except NeedsSync as reason:
            return self._ask_for_sync(step, str(reason))
        finally:
            self._seconds += time.monotonic() - started
        result = self._queue.take()
        num_retries = self._sampler.counts.pop("retries", 0)
        seconds = self._seconds
        self._seconds = 0.0
        self._asked_for.clear()
        self._verdict_check = None
        self._dump(step, result.groups)
        metrics = step_metrics(result, weight_version, num_retries, seconds)
        metrics |= {
            "rollout/num_retractions": self._sampler.counts.pop("retractions", 0),
            "rollout/num_cached_tokens": self._sampler.counts.pop("cached_tokens", 0),
            "rollout/num_servers": len(self._servers.servers),
            "rollout/num_servers_current": self._servers.mean_num_current(),
        }
        if self._pool is not None:
            self._pool.end_step()
            metrics |= self._pool.metrics() | replay_metrics(result.groups, weight_version)
        if uses_dynamic_sampling(self._config):
            words = filter_in_words(self._config)
            log.info("DAPO Dynamic Sampling: Filtered %d samples with %s", result.num_filtered_samples, words)
        batch = RolloutBatch(groups=result.groups, metrics={name: float(value) for name, value in metrics.items()})
        if self._config.trainer.dump_batches:
            write_batch(self._folder.batches, step, batch)
        return batch

    async def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Return the metrics of the held-out prompts; {} where there are none. Raises NeedsSync, RolloutError."""
        if not self._val_prompts:
            return {}

        async def answers() -> dict[str, float]:
            await self._servers.expect(weight_version)
            return await evaluate(self._val_sampler, self._val_prompts, self._config, self._rewards)

        return await within(
            self._rollout.step_timeout_s,
            answers(),
            lambda: self._overdue(f"the evaluation at step {step}", "answers are missing"),
        )

    def state_dict(self) -> dict:
        """Return plain data: the cursor, the surplus groups, the open gen batch if there is one, the experiences."""
        pool = {} if self._pool is None else {"experiences": self._pool.state_dict()}
        return {**self._drawing_state(), **pool}

    def _drawing_state(self) -> dict:
        return {"cursor": self._cursor.state_dict(), "queue": self._queue.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Go on where a saved controller stood. Raises UserError for the state of a run with trainer.replay, which has
        no prompts."""
        if "replay" in state:
            raise UserError(
                f"the checkpoint is of a replay of {state['replay']}, which drew no prompts to go on from; resume it "
                f"with trainer.replay, or from a checkpoint of a run with servers."
            )
        self._cursor.load_state_dict(state["cursor"])
        self._queue.load_state_dict(state["queue"])
        if self._pool is not None and "experiences" in state:
            self._pool.load_state_dict(state["experiences"])

    async def close(self) -> None:
        """End the workers, and close the connections to the servers."""
        await self._rewards.close()
        if self._environments:
            await self._environments.close()
        await self._servers.close()

    async def _fill(self, weight_version: int) -> None:
        """Sample gen batches until the step has its groups."""
        await self._servers.expect(weight_version)
        if not self._seconds:  # the step begins, it does not go on after a push
            self._servers.mean_num_current()  # of what was before
        if self._servers.urls(ServerState.CURRENT):
            self._num_futile_syncs = 0
        while self._queue.wants_gen_batch():
            # one push for each that came back, so that none holds up the others again and again
            if stale := set(self._servers.urls(ServerState.STALE)) - self._asked_for:
                self._asked_for |= stale
                raise NeedsSync(f"not at work with weight version {weight_version}: {', '.join(sorted(stale))}")
            if not self._queue.has_open_gen_batch:
                drawn = next_prompts(self._cursor, self._pool, self._queue.limits.gen_batch_size)
                prompts = [self._prompts[number] for number, _ in drawn]
                self._queue.open_gen_batch(prompts, [replayed for _, replayed in drawn])
            unserved = await run_all(self._sample_group(group) for group in self._queue.missing())
            if reason := next(filter(None, unserved), None):
                raise reason
            self._check_step_verdicts()
            judged = self._queue.close_gen_batch()
            if self._pool is not None:
                self._pool.record(judged)
            log.info("a gen batch is done, %d groups are still wanted", self._queue.num_groups_wanted)

    async def _sample_group(self, drawn: Group) -> NeedsSync | None:
        """Sample a group of the open gen batch, or return why no server could.

        The others go on, and what they finish stays.
        """
        try:
            group = await self._sampler.sample_group(drawn, self._rollout.n, self._params, self._shaping)
        except NeedsSync as reason:
            return reason
        assert self._verdict_check is not None, "a step is open while its groups are sampled"
        self._verdict_check.count(group.samples)
        self._queue.add_finished(group)
        return None

    def _begin_verdicts(self, what: str) -> VerdictCheck:
        """Return a check that counts the groups that a saved state had finished.

        Where too few of their responses were judged, the run was perhaps stopped for it, and the function corrected:
        then they are missing again.
        """
        so_far = VerdictCheck(self._config.reward, what)
        for group in self._queue.finished:
            so_far.count(group.samples)
        if not so_far.are_too_few():
            return so_far
        log.warning("%s: too few finished groups of the saved state were judged; they are sampled again", what)
        self._queue.forget_finished()
        return VerdictCheck(self._config.reward, what)

    def _check_step_verdicts(self) -> None:
        """Raise UserError where too few responses were judged; their prompts are drawn again once the function is
        corrected."""
        assert self._verdict_check is not None, "a step is open while its groups are sampled"
        try:
            self._verdict_check.check(self._rewards.last_traceback)
        except UserError:
            self.load_state_dict(self._state_before_step)
            if self._pool is not None:
                self._pool.forget_step()
            self._verdict_check = None
            raise

    def _ask_for_sync(self, step: int, reason: str) -> RolloutBatch:
        """Return the answer that asks for a push. Raises RolloutError where several pushes did not help."""
        self._num_futile_syncs += 1
        if self._num_futile_syncs > MAX_FUTILE_SYNCS:
            raise RolloutError(f"rollout step {step}: {MAX_FUTILE_SYNCS} weight pushes did not help: {reason}")
        log.warning("step %d waits for weights: %s", step, reason)
        return RolloutBatch(groups=(), metrics={}, needs_sync=True)

    def _overdue(self, what: str, missing: str) -> str:
        """Return the message of a step that is not done in time."""
        in_flight = ", ".join(f"{url} ({num} requests)" for url, num in self._servers.in_flight().items()) or "none"
        down = ", ".join(self._servers.urls(ServerState.DOWN)) or "none"
        return (
            f"{what} is not done after {self._rollout.step_timeout_s:g} s (actor_rollout_ref.rollout.step_timeout_s): "
            f"{missing}; servers with requests in flight: {in_flight}; servers down: {down}."
        )

    def _missing_groups(self) -> str:
        wanted = self._queue.num_groups_wanted
        size = self._queue.limits.train_batch_size
        return f"{wanted} of {size} groups are missing, {len(self._queue.missing())} unfinished in the open gen batch"

    def _dump(self, step: int, groups: Sequence[Group]) -> None:
        """Write some of the step's groups for people."""
        shown = groups[: self._rollout.dump_samples]
        if shown:
            lines = [json.dumps(group_record(step, group, self._tokenizer), ensure_ascii=False) for group in shown]
            try:
                write_whole(self._folder.rollout(step), "\n".join(lines) + "\n")
            except OSError as error:  # no run ends for what people may read
                log.warning("the samples of step %d cannot be written (%s)", step, error)


async def unless(event: asyncio.Event, work: Coroutine, message: str) -> None:
    """Do the work; raise Interrupted(message) as soon as the event is set, where the work is not done by then."""
    doing = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Interrupted(message)
        doing.result()
    finally:
        doing.cancel()
        waiting.cancel()
        await asyncio.wait({doing, waiting})


async def within(timeout_s: float, work: Coroutine, describe: Callable[[], str]) -> Any:
    """Return what work returns; raise RolloutError(describe()) if it takes longer. describe sees the state at the
    deadline."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if done:
            return task.result()
        message = describe()
    finally:
        task.cancel()
        await asyncio.wait({task})
    raise RolloutError(message)


def load_prompts(files: Sequence[str], config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of these files; what was dropped is logged. Raises UserError."""
    data = config.data
    is_multi_turn = config.actor_rollout_ref.rollout.multi_turn.enable
    dataset = PromptDataset.load(
        files,
        data.prompt_key,
        tokenizer,
        data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        dedup=data.dedup,
        conflicting_answers="keep" if is_multi_turn else data.conflicting_answers,
        apply_chat_template=data.apply_chat_template,
    )
    for report in dataset.report:
        log.info("%s", report)
    return dataset.prompts


def make_environments(config: Config) -> EnvironmentPool | None:
    """Return the pool of environments, None where responses have one turn."""
    keys = config.actor_rollout_ref.rollout.multi_turn
    if not keys.enable:
        return None
    return EnvironmentPool(
        keys.environment,
        keys.environment_kwargs,
        keys.num_workers,
        keys.step_timeout_s,
        keys.memory_limit_mb,
        keys.pass_env,
    )


def turn_limits(config: Config) -> TurnLimits:
    """Return the limits of a trajectory of several turns."""
    keys = config.actor_rollout_ref.rollout.multi_turn
    return TurnLimits(config.data.max_prompt_length, keys.max_turns, keys.max_tokens_per_turn, keys.timeout_s)


def make_shaping(config: Config) -> OverlongShaping | None:
    """Return how over-long responses are punished, None where they are not."""
    if not uses_overlong_shaping(config):
        return None
    keys = config.algorithm.dapo.overlong_reward_shaping
    return OverlongShaping(
        max_response_length=config.data.max_response_length,
        buffer_len=keys.buffer_len,
        expected_len=keys.expected_len,
        penalty_factor=keys.penalty_factor,
        truncation_penalty=keys.truncation_penalty,
        mode=keys.soft_penalty_mode,
    )
