"""The rollout controller: prompts -> servers -> rewards -> groups -> dynamic sampling -> batches.

One asyncio event loop, in a process of its own (handle.py), so that it never competes with
training. Prompts are drawn and sampled by `filling.py`; with `max_staleness` above 0 that goes on
while the trainer trains.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.rollout_errors import NeedsSync, RolloutError
from megatron_dapo.config.derived import (
    advantage_estimator,
    has_given_servers,
    replays_servers_experts,
    uses_dynamic_sampling,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group, PartialResponse, RolloutBatch, Sample
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.queue.experience_replay import replay_metrics
from megatron_dapo.queue.group_filter import filter_in_words
from megatron_dapo.queue.step_statistics import RolloutStep
from megatron_dapo.rewards.reward_registry import check_estimator
from megatron_dapo.rollout.agent_play import Agents
from megatron_dapo.rollout.answer_records import group_record, line_of, with_texts
from megatron_dapo.rollout.batch_files import write_batch
from megatron_dapo.rollout.build_rollout import (
    load_prompts,
    load_train_prompts,
    make_environments,
    make_reward_pool,
    make_sampler,
    make_scorers,
    make_server_pool,
    make_shaping,
    router_shape,
    sampling_params,
)
from megatron_dapo.rollout.deadlines import until_set, within
from megatron_dapo.rollout.drawing import Drawing
from megatron_dapo.rollout.filling import Filling
from megatron_dapo.rollout.held_out_evaluation import Validation
from megatron_dapo.rollout.step_metrics import restart_metrics, row_metrics, step_metrics
from megatron_dapo.rollout.time_spent import TimeSpent
from megatron_dapo.servers.server_health import ServerState
from megatron_dapo.servers.server_versions import require_deterministic, require_in_flight_updates, require_weight_form
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

MAX_FUTILE_SYNCS = 3  # pushes after which no server had the weights


class Controller:
    """The prompts, servers, rewards and queue of groups behind `next_batch` and `evaluate`.

    One call at a time; with `max_staleness` above 0 groups are sampled between the calls too. Make
    it with `Controller(config)` (reads data and tokenizer; raises UserError), then `await start()`.
    Once `stop_asked` is set, `next_batch` waits for no further group.
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
        self._sampler = sampler(
            shaping=make_shaping(config),
            greedy_baseline=greedy_baseline,
            exact=not rollout.max_staleness,
            routers=routers,
        )
        val_sampler = sampler(exact=True, is_validation=True)  # a second one: its retries are not the step's
        self._validation = Validation(self._val_prompts, config, val_sampler, self._servers, self._rewards, tokenizer)
        self._params = sampling_params(config)
        self._drawing = Drawing(config, dataset, lambda: self._rewards.last_traceback)
        self._agents = self._environments if isinstance(self._environments, Agents) else None
        places = None if self._agents is None else self._agents.places
        self._filling = Filling(self._drawing, self._servers, self._sample_group, rollout.n, greedy_baseline, places)
        self._sampling = TimeSpent()
        self._num_futile_syncs = 0  # since a server had the weights

    async def start(self) -> None:
        """Start the reward workers and wait for all servers. Raises UserError or RolloutError."""
        await self._rewards.start()
        if self._rewards.scores_groups and advantage_estimator(self._config).needs_baseline:
            raise UserError(
                f"reward.function {self._config.reward.function} scores the responses to a prompt together, but "
                f"algorithm.adv_estimator {self._config.algorithm.adv_estimator} needs the reward of one greedy "
                f"response; take another of the two."
            )
        if advantage_estimator(self._config).divides_by_mean:
            names = self._config.algorithm.adv_estimator, self._config.reward.function
            check_estimator(*names, [""], self._rewards.wrong_score)
        if self._environments:
            await self._environments.start()
        await self._scorers.start(self._rollout.server.startup_timeout_s)
        await self._servers.start(self._rollout.server.startup_timeout_s)
        if self._rollout.max_staleness > 0:
            await require_in_flight_updates([server.client for server in self._servers.servers])
        if self._rollout.deterministic:
            await require_deterministic([server.client for server in self._servers.servers])
        for server in self._servers.servers:
            info = await server.client.server_info()
            require_weight_form(server.url, info, self._rollout.quantization is not None)
        log.info("ready: %d servers, %d held-out prompts", len(self._servers.servers), len(self._val_prompts))

    async def next_batch(self, step: int, weight_version: int) -> RolloutBatch:
        """Return the groups of one rollout step.

        Servers hold weight_version; tokens are up to `max_staleness` versions older.

        Raises NeedsSync if servers lack the weights: push them and call again with the same step;
        its groups and counts go on. Raises UserError if dynamic sampling is exhausted or too few
        responses got a verdict. Raises RolloutError at `step_timeout_s` or if servers fail,
        Interrupted if it was asked to stop.
        """
        self._drawing.begin(step, weight_version)
        if not self._sampling.has_run:  # the step begins, and nothing went on before it
            self._servers.forget_means()
        self._sampling.switch(True)
        try:
            await within(
                self._rollout.step_timeout_s,
                until_set(self.stop_asked, self._sample_step(weight_version), f"rollout step {step} was asked to stop"),
                lambda: self._overdue(f"rollout step {step}", self._missing_groups()),
            )
        except NeedsSync as reason:
            self._count_futile_sync(step, reason)
            raise
        finally:
            self._sampling.switch(self._rollout.max_staleness > 0)
        result = self._drawing.take()
        groups = with_texts(result.groups, self._rollout.dump_samples, self._tokenizer)
        self._dump(step, groups)
        metrics = self._metrics(result, weight_version)
        if uses_dynamic_sampling(self._config):
            words = filter_in_words(self._config)
            log.info("DAPO Dynamic Sampling: Filtered %d samples with %s", result.num_filtered_samples, words)
        batch = RolloutBatch(groups=groups, metrics={name: float(value) for name, value in metrics.items()})
        if self._config.trainer.dump_batches:
            write_batch(self._folder.batches, step, batch)
        return batch

    def _metrics(self, result: RolloutStep, weight_version: int) -> dict[str, float]:
        """Return the step's metrics; counting begins anew."""
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
            "rollout/num_moves": counts.pop("moves", 0),
            **restart_metrics(metrics, counts.pop("restarts", 0)),
            **self._servers.take_speeds(),
            **self._servers.take_room_used(),
            **self._drawing.metrics(),
            "reward/wait_share": self._sampler.reward_wait.take() / metrics["rollout/seconds"],
        }
        if self._agents is not None:  # which choose names of their own
            metrics = self._agents.metrics.take() | metrics | row_metrics(result.groups)
        if self._drawing.pool is not None:
            metrics |= self._drawing.pool.metrics() | replay_metrics(result.groups, weight_version)
        return metrics

    async def begin_evaluation(self, step: int, weight_version: int) -> None:
        """Have the held-out prompts answered while training's requests go on.

        `evaluate` waits for the answers. Servers hold weight_version until then.
        """
        if self._val_prompts:
            self._validation.begin(step, weight_version, partial(self._evaluation_overdue, step))

    async def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Return the metrics of the held-out prompts; {} without any. Only this version answers.

        Waits for the evaluation of `begin_evaluation`, or begins it. Raises NeedsSync,
        RolloutError, UserError.
        """
        if not self._val_prompts:
            return {}
        await self._filling.raise_failure()
        return await self._validation.end(step, weight_version, partial(self._evaluation_overdue, step))

    def _evaluation_overdue(self, step: int) -> str:
        return self._overdue(f"the evaluation at step {step}", "answers are missing")

    async def halt(self) -> str | None:
        """End all sampling, and return the error that had ended it before, if any.

        `state_dict` then has the unfinished responses of one turn; those with an environment or an
        agent begin anew.
        """
        _, failure = await asyncio.gather(self._validation.cancel(), self._filling.halt())
        return None if failure is None else str(failure)

    def state_dict(self, with_samples: bool = True) -> dict:
        """Return plain data: the place in the prompts, ready and open groups, the experiences.

        with_samples: False leaves out the samples ahead of the trainer, which may be gigabytes;
        their prompts are sampled again.
        """
        return self._drawing.state_dict(with_samples)

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved controller.

        Raises UserError for a state of trainer.replay or of other prompts.
        """
        self._drawing.load_state_dict(state)

    async def close(self) -> None:
        """End all sampling and the workers, and close the connections to the servers."""
        await asyncio.gather(self._validation.cancel(), self._filling.cancel())
        await self._rewards.close()
        await self._scorers.close()
        if self._environments:
            await self._environments.close()
        await self._servers.close()

    async def _sample_step(self, weight_version: int) -> None:
        """Wait for the servers, then for the step's groups. A failure ends all sampling."""
        await self._servers.expect(weight_version)
        if self._servers.urls(ServerState.CURRENT):
            self._num_futile_syncs = 0
        await self._filling.fill()

    async def _sample_group(
        self, group: Group, on_sample: Callable[[Sample], None], on_partial: Callable[[PartialResponse], None]
    ) -> Group:
        if self._rollout.deterministic:
            # it begins anew: a server that reads tokens instead of writing them adds up in another
            # order
            on_partial = _discarded
        return await self._sampler.sample_group(group, self._rollout.n, self._params, on_sample, on_partial)

    def _count_futile_sync(self, step: int, reason: NeedsSync) -> None:
        """Count a request for a push. Raises RolloutError if several pushes did not help."""
        self._num_futile_syncs += 1
        if self._num_futile_syncs > MAX_FUTILE_SYNCS:
            raise RolloutError(f"rollout step {step}: {MAX_FUTILE_SYNCS} weight pushes did not help: {reason}")
        log.warning("step %d waits for weights: %s", step, reason)

    def _overdue(self, what: str, missing: str) -> str:
        """Return the message of an overdue step."""
        in_flight = ", ".join(f"{url} ({num} requests)" for url, num in self._servers.in_flight().items()) or "none"
        down = ", ".join(self._servers.urls(ServerState.DOWN, ServerState.ILL)) or "none"
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
            lines = [line_of(group_record(step, group, self._tokenizer)) for group in shown]
            try:
                write_whole(self._folder.rollout(step), b"".join(lines))
            except OSError as error:  # only people read them: no reason to end a run
                log.warning("the samples of step %d cannot be written (%s)", step, error)


def _discarded(response: PartialResponse) -> None:
    """Drop an unfinished response."""
