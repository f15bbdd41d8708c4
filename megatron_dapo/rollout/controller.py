"""The rollout controller: prompts -> servers -> rewards -> groups -> dynamic sampling -> finished batches.

One asyncio event loop, in a process of its own (handle.py), so that it never competes with training. Prompts are drawn
and sampled by `filling.py`; with `max_staleness` above 0 that goes on while the trainer trains.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.rollout_errors import NeedsSync, RolloutError
from megatron_dapo.config.derived import (
    advantage_estimator,
    has_given_servers,
    replays_servers_experts,
    uses_dynamic_sampling,
    uses_overlong_shaping,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.data.samples import Group, PartialResponse, Prompt, RolloutBatch, Sample
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.envs.environment_pool import EnvironmentPool
from megatron_dapo.huggingface.model_spec import read_model_spec, read_vocab_size
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.queue.experience_replay import replay_metrics
from megatron_dapo.queue.group_filter import filter_in_words
from megatron_dapo.queue.step_statistics import RolloutStep
from megatron_dapo.rewards.judge import Judge
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_registry import check_ground_truths, check_reward
from megatron_dapo.rewards.scorers import Scorers, Weighed
from megatron_dapo.rewards.shaping import OverlongShaping
from megatron_dapo.rollout.answer_records import group_record
from megatron_dapo.rollout.batch_files import write_batch
from megatron_dapo.rollout.deadlines import unless, within
from megatron_dapo.rollout.drawing import Drawing
from megatron_dapo.rollout.filling import Filling
from megatron_dapo.rollout.held_out_evaluation import Validation
from megatron_dapo.rollout.reward_model_client import RewardModel
from megatron_dapo.rollout.sampling import RetryPolicy, Sampler
from megatron_dapo.rollout.step_metrics import step_metrics
from megatron_dapo.rollout.time_spent import TimeSpent
from megatron_dapo.rollout.trajectory import MultiTurn, TurnLimits
from megatron_dapo.servers.client import SamplingParams, SGLangClient
from megatron_dapo.servers.server import ServerState
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.server_versions import require_deterministic, require_in_flight_updates
from megatron_dapo.servers.server_watch import report_unresponsive
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import given_server_key, read_server_key

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0  # between two looks at a server that is down
MAX_FUTILE_SYNCS = 3  # where no server has the weights after so many pushes, none ever will


class Controller:
    """The rollout of a run: prompts, servers, rewards and the queue of groups behind `next_batch` and `evaluate`.

    One call at a time; with `max_staleness` above 0 groups are sampled between the calls too. Make it with
    `Controller(config)` (reads data and tokenizer; raises UserError), then `await start()`. Once `stop_asked` is set,
    `next_batch` waits for no further group.
    """

    def __init__(self, config: Config) -> None:
        self.stop_asked = asyncio.Event()
        data = config.data
        rollout = config.actor_rollout_ref.rollout
        if not has_given_servers(config):
            raise UserError("actor_rollout_ref.rollout.server_urls = []: give the URLs of running servers.")
        self._config = config
        self._rollout = rollout
        self._folder = RunFolder.of(config.trainer)
        tokenizer = load_tokenizer(ModelFolder.of(config.actor_rollout_ref.model.path).hf)
        self._tokenizer = tokenizer
        dataset = load_train_prompts(config, tokenizer)
        self._val_prompts = load_prompts(data.val_files, config, tokenizer) if data.val_files else []
        self._servers = make_server_pool(config)
        self._rewards = make_reward_pool(config, [*dataset.prompts, *self._val_prompts])
        self._scorers = make_scorers(config)
        self._environments = make_environments(config)
        scoring = (self._rewards, tokenizer, self._environments, self._scorers)
        sampler = partial(make_sampler, config, self._servers, *scoring)
        greedy_baseline = advantage_estimator(config).needs_baseline
        routers = router_shape(config) if replays_servers_experts(config) else None
        self._sampler = sampler(greedy_baseline=greedy_baseline, exact=not rollout.max_staleness, routers=routers)
        val_sampler = sampler(exact=True)  # a second one: its retries are not the step's
        self._validation = Validation(self._val_prompts, config, val_sampler, self._servers, self._rewards, tokenizer)
        self._params = SamplingParams(
            max_new_tokens=data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=tuple(rollout.stop_token_ids),
        )
        self._shaping = make_shaping(config)
        self._drawing = Drawing(config, dataset, lambda: self._rewards.last_traceback)
        self._filling = Filling(self._drawing, self._servers, self._sample_group, rollout.n, greedy_baseline)
        self._sampling = TimeSpent()
        self._num_futile_syncs = 0  # asked for since a server had the weights

    async def start(self) -> None:
        """Start the reward workers and wait for all servers. Raises UserError or RolloutError."""
        await self._rewards.start()
        if self._rewards.scores_groups and advantage_estimator(self._config).needs_baseline:
            raise UserError(
                f"reward.function {self._config.reward.function} scores the responses to a prompt together, but "
                f"algorithm.adv_estimator {self._config.algorithm.adv_estimator} needs the reward of one greedy "
                f"response; take another of the two."
            )
        if self._environments:
            await self._environments.start()
        await self._scorers.start(self._rollout.server.startup_timeout_s)
        await self._servers.start(self._rollout.server.startup_timeout_s)
        if self._rollout.max_staleness > 0:
            await require_in_flight_updates([server.client for server in self._servers.servers])
        if self._rollout.deterministic:
            await require_deterministic([server.client for server in self._servers.servers])
        log.info("ready: %d servers, %d held-out prompts", len(self._servers.servers), len(self._val_prompts))

    async def next_batch(self, step: int, weight_version: int) -> RolloutBatch:
        """Return the groups of one rollout step. Servers hold weight_version; tokens are up to `max_staleness` versions
        older.

        With needs_sync in the answer: push the weights and call again with the same step; its groups and counts go on.
        Raises UserError where dynamic sampling is exhausted or too few responses got a verdict, RolloutError at
        `step_timeout_s` or when servers fail, Interrupted where it was asked to stop.
        """
        self._drawing.begin(step, weight_version)
        if not self._sampling.has_run:  # the step begins, and nothing went on before it
            self._servers.forget_means()
        self._sampling.turn(True)
        try:
            await within(
                self._rollout.step_timeout_s,
                unless(self.stop_asked, self._sample_step(weight_version), f"rollout step {step} was asked to stop"),
                lambda: self._overdue(f"rollout step {step}", self._missing_groups()),
            )
        except NeedsSync as reason:
            return self._ask_for_sync(step, str(reason))
        finally:
            self._sampling.turn(self._rollout.max_staleness > 0)
        result = self._drawing.take()
        self._dump(step, result.groups)
        metrics = self._metrics(result, weight_version)
        if uses_dynamic_sampling(self._config):
            words = filter_in_words(self._config)
            log.info("DAPO Dynamic Sampling: Filtered %d samples with %s", result.num_filtered_samples, words)
        batch = RolloutBatch(groups=result.groups, metrics={name: float(value) for name, value in metrics.items()})
        if self._config.trainer.dump_batches:
            write_batch(self._folder.batches, step, batch)
        return batch

    def _metrics(self, result: RolloutStep, weight_version: int) -> dict[str, float]:
        """Return the step's metrics, which are counted anew from now on."""
        counts = self._sampler.counts
        metrics = step_metrics(result, weight_version, counts.pop("retries", 0), self._sampling.take())
        metrics |= {
            "rollout/num_groups_open": self._drawing.queue.num_open,
            "rollout/num_retractions": counts.pop("retractions", 0),
            "rollout/num_cached_tokens": counts.pop("cached_tokens", 0),
            "rollout/num_servers": len(self._servers.servers),
            "rollout/num_servers_current": self._servers.mean_num_current(),
            "rollout/slots_used": self._servers.mean_slots_used(),
            "rollout/servers_waiting": self._servers.mean_without_requests(),
            "rollout/held_s": self._filling.take_held_s(),
            **self._drawing.metrics(),
            "reward/wait_share": self._sampler.reward_wait.take() / metrics["rollout/seconds"],
        }
        if kv_used := self._servers.take_kv_used():
            metrics |= dict(zip(("rollout/kv_used_mean", "rollout/kv_used_max"), kv_used, strict=True))
        if self._drawing.pool is not None:
            metrics |= self._drawing.pool.metrics() | replay_metrics(result.groups, weight_version)
        return metrics

    async def begin_evaluation(self, step: int, weight_version: int) -> None:
        """Have the held-out prompts answered while training's requests go on; `evaluate` waits for the answers.

        Servers hold weight_version until then.
        """
        if self._val_prompts:
            self._validation.begin(step, weight_version, partial(self._evaluation_overdue, step))

    async def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Return the metrics of the held-out prompts, answered by weight_version alone; {} where there are none.

        Waits for what `begin_evaluation` began, or begins it. Raises NeedsSync, RolloutError, UserError.
        """
        if not self._val_prompts:
            return {}
        await self._filling.raise_failure()
        return await self._validation.end(step, weight_version, partial(self._evaluation_overdue, step))

    def _evaluation_overdue(self, step: int) -> str:
        return self._overdue(f"the evaluation at step {step}", "answers are missing")

    async def halt(self) -> str | None:
        """End what is under way. `state_dict` then has what there is of unfinished responses of one turn; those with an
        environment begin anew. Returns what had ended the sampling before, if anything did."""
        await self._validation.cancel()
        failure = await self._filling.halt()
        return None if failure is None else str(failure)

    def state_dict(self, with_samples: bool = True) -> dict:
        """Return plain data: the place in the prompts, the groups that are ready or open, the experiences.

        with_samples: False leaves out what was sampled ahead of the trainer, which may be gigabytes; its prompts are
        sampled again.
        """
        return self._drawing.state_dict(with_samples)

    def load_state_dict(self, state: dict) -> None:
        """Go on where a saved controller stood. Raises UserError for the state of a run with trainer.replay, or of
        other prompts."""
        self._drawing.load_state_dict(state)

    async def close(self) -> None:
        """End what is under way and the workers, and close the connections to the servers."""
        await self._validation.cancel()
        await self._filling.cancel()
        await self._rewards.close()
        await self._scorers.close()
        if self._environments:
            await self._environments.close()
        await self._servers.close()

    async def _sample_step(self, weight_version: int) -> None:
        """Wait for the servers, then until the queue has the step's groups. What fails ends all sampling."""
        await self._servers.expect(weight_version)
        if self._servers.urls(ServerState.CURRENT):
            self._num_futile_syncs = 0
        await self._filling.fill()

    async def _sample_group(
        self, group: Group, on_sample: Callable[[Sample], None], on_partial: Callable[[PartialResponse], None]
    ) -> Group:
        if self._rollout.deterministic:
            # it begins anew: a server that reads tokens in place of writing them adds up in another order
            on_partial = discarded
        return await self._sampler.sample_group(
            group, self._rollout.n, self._params, self._shaping, on_sample, on_partial
        )

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
        queue = self._drawing.queue
        size = queue.limits.train_batch_size
        head = "".join(
            f", the first of them {group.uid} with {len(group.samples)} of {self._rollout.n} responses"
            for group in queue.open_groups[:1]
        )
        return (
            f"{queue.num_groups_wanted} of {size} groups are missing, {queue.num_unfinished} unfinished; last step "
            f"handed over {queue.num_steps}, weight version {self._servers.version}, {queue.num_ready} groups ready, "
            f"{queue.num_open} open{head}"
        )

    def _dump(self, step: int, groups: Sequence[Group]) -> None:
        """Write some of the step's groups for people."""
        shown = groups[: self._rollout.dump_samples]
        if shown:
            lines = [json.dumps(group_record(step, group, self._tokenizer), ensure_ascii=False) for group in shown]
            try:
                write_whole(self._folder.rollout(step), "\n".join(lines) + "\n")
            except OSError as error:  # no run ends for what people may read
                log.warning("the samples of step %d cannot be written (%s)", step, error)


def discarded(response: PartialResponse) -> None:
    """Keep nothing of a response that is not finished."""


def load_train_prompts(config: Config, tokenizer: Tokenizer, max_rows: int | None = None) -> PromptDataset:
    """Return the prompts to train on, of which `data.pass_rate` is a condition; what was dropped is logged. max_rows:
    of the first rows of each file alone. Raises UserError."""
    data = config.data
    difficulty_key = data.difficulty_key if data.curriculum == "column" else None
    numbers = {"pass_rate": data.pass_rate, "pass_rate_key": data.pass_rate_key, "difficulty_key": difficulty_key}
    dataset = load_dataset(data.train_files, config, tokenizer, max_rows=max_rows, **numbers)
    for report in dataset.report:
        log.info("%s", report)
    return dataset


def load_prompts(files: Sequence[str], config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of these files; what was dropped is logged. Raises UserError."""
    dataset = load_dataset(files, config, tokenizer)
    for report in dataset.report:
        log.info("%s", report)
    return dataset.prompts


def load_dataset(files: Sequence[str], config: Config, tokenizer: Tokenizer, **others: Any) -> PromptDataset:
    """Return the prompts of these files, and what was dropped. others: further arguments of `PromptDataset.load`.
    Raises UserError."""
    data = config.data
    is_multi_turn = config.actor_rollout_ref.rollout.multi_turn.enable
    return PromptDataset.load(
        files,
        data.prompt_key,
        tokenizer,
        data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        dedup=data.dedup,
        conflicting_answers="keep" if is_multi_turn else data.conflicting_answers,
        apply_chat_template=data.apply_chat_template,
        answer_key=data.answer_key,
        prompt_template=data.prompt_template,
        data_source=data.data_source,
        needs_answer=not is_multi_turn and config.reward.function != "none",
        **others,
    )


def make_server_pool(config: Config) -> ServerPool:
    """Return the pool of the servers that the config names."""
    rollout = config.actor_rollout_ref.rollout
    is_pushed_to_at_work = rollout.max_staleness or config.data.val_files
    return ServerPool(
        ServerList.of_config(rollout),
        max_concurrency=rollout.max_concurrency,
        down_timeout_s=rollout.server.startup_timeout_s,
        probe_interval_s=PROBE_INTERVAL_S,
        connect=partial(SGLangClient, api_key=given_server_key(config)),
        report_unresponsive=partial(report_unresponsive, RunFolder.of(config.trainer)),
        keeps_caches=config.weight_sync.pause_mode == "in_place",
        push_s=config.weight_sync.timeout_s if is_pushed_to_at_work else 0.0,
    )


def make_reward_pool(config: Config, prompts: Sequence[Prompt]) -> RewardPool:
    """Return the pool of reward processes. Raises UserError for a function that does not score these prompts."""
    reward = config.reward
    sources = sorted({prompt.data_source for prompt in prompts})
    check_reward(reward.function, reward.kwargs, sources)
    check_ground_truths(reward.function, prompts)
    return RewardPool(
        reward.function,
        reward.kwargs,
        reward.num_workers,
        reward.timeout_s,
        reward.memory_limit_mb,
        reward.pass_env,
        sources,
        reward.allow_unsandboxed,
        reward.max_concurrency,
        reward.batch_size,
        config.trainer.seed,
    )


def make_sampler(
    config: Config,
    servers: ServerPool,
    rewards: RewardPool,
    tokenizer: Tokenizer,
    environments: EnvironmentPool | None,
    scorers: Scorers,
    greedy_baseline: bool = False,
    exact: bool = False,
    routers: RouterShape | None = None,
) -> Sampler:
    """Return the way from prompts to groups. The arguments behind the config are the sampler's own."""
    rollout = config.actor_rollout_ref.rollout
    retry = RetryPolicy(rollout.request_timeout_s, rollout.max_retries)
    vocab_size = read_vocab_size(config.actor_rollout_ref.model.path)
    multi_turn: MultiTurn | None = None
    if environments is not None:
        multi_turn = MultiTurn(environments, tokenizer, config.data.apply_chat_template, turn_limits(config))
    return Sampler(
        servers,
        rewards,
        tokenizer,
        retry,
        vocab_size,
        multi_turn,
        greedy_baseline,
        exact,
        scorers,
        routers,
        config.trainer.seed,
    )


def router_shape(config: Config) -> RouterShape:
    """Return what the routers of the model choose. Raises UserError."""
    return RouterShape.of(read_model_spec(config.actor_rollout_ref.model.path))


def make_scorers(config: Config) -> Scorers:
    """Return who scores responses beside the reward function. Raises UserError."""
    reward = config.reward
    weighed = []
    if model := make_reward_model(config):
        weighed.append(Weighed(model, reward.model.weight))
    if reward.judge.url:
        weighed.append(Weighed(Judge(reward.judge), reward.judge.weight))
    return Scorers(reward, weighed)


def make_reward_model(config: Config) -> RewardModel | None:
    """Return the scores by the model of `reward.model`, None without one. Raises UserError where no server is named, or
    the folder is no classifier's."""
    model = config.reward.model
    if not model.path:
        return None
    if not model.url:
        raise UserError(
            "reward.model.path is given without reward.model.url; give the URL of a running server of it, or use "
            "`python -m launch.local`, which starts one."
        )
    folder = ModelFolder.of(model.path).hf
    architecture_of(str(folder))
    api_key = read_server_key(model.api_key_file, "reward.model.api_key_file") if model.api_key_file else None
    down_timeout_s = config.actor_rollout_ref.rollout.server.startup_timeout_s
    return RewardModel(load_tokenizer(folder), SGLangClient(model.url, api_key), down_timeout_s)


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
