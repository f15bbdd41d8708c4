"""This rank's parts of a run, for the loop in trainer.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch

from megatron_dapo.algorithms.kl import KL_CONTROLLERS
from megatron_dapo.checkpointing.model_weights import load_weights, weight_loader
from megatron_dapo.checkpointing.resume import Start
from megatron_dapo.checkpointing.run_checkpoints import RunCheckpoints, Trained
from megatron_dapo.common.errors import JobError, RunStopped, UserError
from megatron_dapo.common.rollout_errors import ForeignSamples, Interrupted, NeedsSync, RolloutError, ServersLost
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.derived import max_mismatch, needs_old_log_probs, shares_gpus, uses_servers
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group, drop_experts
from megatron_dapo.estimates.flops import forward_flops, training_flops
from megatron_dapo.estimates.hardware import peak_flops
from megatron_dapo.placement import Placement, start_placement
from megatron_dapo.platform import watchdog
from megatron_dapo.platform.device import is_gpu, peak_memory
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.rollout.batch_source import BatchSource
from megatron_dapo.rollout.start import start_rollout
from megatron_dapo.run_setup import (
    HANG_MARGIN_S,
    joined_ranks,
    locked_start,
    open_telemetry,
    save_model,
    trained_model,
)
from megatron_dapo.storage.model_folder import CRITIC, MEGATRON
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry import performance
from megatron_dapo.telemetry.closing_table import has_validation
from megatron_dapo.telemetry.performance import PhaseWork, RankPeak
from megatron_dapo.telemetry.telemetry import NullTelemetry, Telemetry
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.distribute import StepDistributor, StepShard
from megatron_dapo.training.in_use import in_use
from megatron_dapo.training.policy import Policy
from megatron_dapo.training.roles import make_critic, make_reference
from megatron_dapo.training.token_dumps import TokenDumps
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

Answer = TypeVar("Answer")

# beyond the rollout's own deadline, so that its error with the missing parts comes first
_GRACE_S = 120.0
_COMPUTING = ("distribute", "ref_log_probs", "old_log_probs", "values", "advantages", "update_critic", "update")
# for one question to the rollout: servers may be lost and come back often, but not for ever
_MAX_SYNCS = 50
_SHOWN_SERVERS = 8


class Job:
    """This rank's parts of the run. Rank 0 has the rollout and writes the metrics."""

    def __init__(
        self,
        config: Config,
        layout: ParallelLayout,
        telemetry: Telemetry | NullTelemetry,
        rollout: BatchSource | None,
        run: RunFolder,
        start: Start,
        placement: Placement,
    ) -> None:
        """Build the models. Collective. rollout: on rank 0, None elsewhere."""
        self.config = config
        self.layout = layout
        self.telemetry = telemetry
        self._rollout = rollout
        self.run = run
        self.policy = Policy(config, layout, weight_loader(start, "model"))
        self.reference = make_reference(config, layout, self.policy, load_weights, telemetry.phase)
        self.critic = make_critic(config, layout, weight_loader(start, "critic"), telemetry.phase)
        model = self.policy.model
        self.distributor = StepDistributor(config, layout, model.spec, model.routed_layers)
        self.placement = placement
        reference, critic_model = self.reference.model, self.critic.model
        placement.hold(self.policy.weight_source(), (self.policy, reference, critic_model))
        self._saved_step: int | None = None  # before its push
        self._num_rejoins = 0  # of servers, in pushes between two steps
        self._num_optimizer_steps = 0  # of the last step
        self._updated_step = 0  # the last one with an update begun
        self._validated_step: int | None = None  # under validation
        self._max_mismatch = max_mismatch(config)
        self._token_dumps = TokenDumps(config, layout, run)
        self._groups: list[Group] | None = None  # of the step, on rank 0
        kl_ctrl = config.algorithm.kl_ctrl
        self.kl_controller = KL_CONTROLLERS[kl_ctrl.type](kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
        critic = trained_model(CRITIC, critic_model) if critic_model is not None else None
        trained = Trained(trained_model(MEGATRON, self.policy), critic, self.kl_controller, rollout)
        self.checkpoints = RunCheckpoints(config, run, layout, trained, start)

    def wait_for_rollout(self) -> None:
        """Wait until prompts are read and every server is healthy. Servers start while the models
        are built; on shared GPUs before that."""
        with self.telemetry.phase("start"):
            self._ask_rollout(0, lambda rollout: rollout.wait_ready())

    def begin_training(self) -> None:
        """Give the trainer the GPUs if it shares them: validation ends, and the servers sleep."""
        if self.placement.saves_first:
            self.finish_validation()
            self.placement.to_trainer()

    def next_batch(self, step: int) -> tuple[list[Group] | None, dict[str, float]]:
        """Return the step's groups and the rollout's metrics, on rank 0."""
        watchdog.begin_step(step)
        with self._saved_if_lost(step - 1), self.telemetry.phase("rollout"):
            is_to_stop = self.checkpoints.is_asked_to_stop
            batch = self._ask_rollout(step - 1, lambda rollout: rollout.next_batch(step, step - 1, is_to_stop))
        return (list(batch.groups), batch.metrics) if batch else (None, {})

    def distribute(self, step: int, groups: list[Group] | None) -> StepShard:
        """Return this rank's shard of the step. On rank 0 the groups lose their routed experts."""
        self._poll_save()
        self._groups = groups
        with self.telemetry.phase("distribute"):
            shard = self.distributor(step, groups)
            if groups is not None:
                drop_experts(groups)
        return shard

    def score(self, step: int, shard: StepShard) -> tuple[StepShard, dict[str, float]]:
        """Return the shard with its loss's log-probs and advantages, and metrics of them."""
        # first: the policy may have to compare itself with the reference's hidden states
        shard = self.reference.score(shard)
        with self.telemetry.phase("old_log_probs"):
            shard = shard.with_mini_batches(self.policy.score(shard.mini_batches))
            if self._max_mismatch is not None and needs_old_log_probs(self.config):
                self._refuse_foreign(step, shard, self.policy.mean_mismatch(shard.mini_batches, step - 1))
        shard = self.critic.score(shard)
        with self.telemetry.phase("advantages"):
            shard, metrics = estimate_advantages(shard, self.kl_controller, self.config, self.layout)
        with self.telemetry.phase("distribute"):
            self._token_dumps.write(step, self._groups, shard)
        return shard, metrics

    def update_critic(self, shard: StepShard) -> dict[str, float]:
        """Take the critic's optimizer steps, if there is a critic; return its metrics."""
        return self.critic.update(shard)

    def update_policy(self, step: int, shard: StepShard) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return metrics.

        Do nothing while the critic warms up: the servers then get the same weights under a new
        version.
        """
        self._poll_save()
        self._updated_step = step
        if step <= self.config.trainer.critic_warmup:
            return {}
        with self.telemetry.phase("update"):
            # with old log-probs `score` has checked already
            is_checked = self._max_mismatch is None or needs_old_log_probs(self.config)
            check = None if is_checked else partial(self._refuse_foreign, step, shard)
            metrics = self.policy.update(shard.mini_batches, weight_version=step - 1, check=check)
        self._num_optimizer_steps = _optimizer_steps(metrics)
        return metrics

    def _refuse_foreign(self, step: int, shard: StepShard, mean: float) -> None:
        """Raise ForeignSamples on all ranks if servers and trainer differ by more than the limit.

        The step before is then saved, with the rollout as before this one. mean: equal on all
        ranks.
        """
        limit = self._max_mismatch
        if limit is None or mean <= limit:  # false for NaN
            return
        if self._rollout is not None:
            self._rollout.refuse_batch()
        with self._saved_if_lost(step - 1):
            shares = self.policy.mismatch_by_sample(shard.mini_batches, weight_version=step - 1)
            agreement = self.layout.agreement
            samples = (sample for group in self._groups or () for sample in group.samples)
            servers_of = [sample.servers for sample in samples for _ in sample.branches]
            raise ForeignSamples(agreement.leader("rollout", foreign_samples, step, mean, limit, shares, servers_of))

    def push_weights(self, version: int) -> dict[str, float]:
        """Send the current weights to the present servers.

        Return the seconds per phase, the number of servers with the weights, and the rejoins since
        the last call. Pushes between two steps count. Without servers: {}.
        """
        report = self.placement.push(version)
        num_rejoins = self._num_rejoins + report.num_rejoins
        self._num_rejoins = 0
        return report.metrics(num_rejoins)

    def performance(self, groups: list[Group] | None, metrics: dict[str, float]) -> dict[str, float]:
        """Return, on rank 0, the use of the trainer's and servers' ranks in the step so far.

        groups, metrics: the rollout's and the update's. On GPUs collective, for the peaks of
        memory.
        """
        peaks = self.layout.gather(RankPeak(self.layout.pp_rank, *peak_memory())) if is_gpu() else []
        if groups is None:
            return {}
        num_ranks = self.layout.world_size
        num_server_ranks = performance.server_ranks(self.config, metrics)
        num_other_ranks = 0 if shares_gpus(self.config) else num_server_ranks  # on GPUs of their own
        seconds = self.telemetry.seconds
        num_epochs = self.config.actor_rollout_ref.actor.ppo_epochs if _optimizer_steps(metrics) else 0
        waiting_s = sum(map(seconds, performance.WAITING))
        return {
            **(performance.memory_metrics(peaks) if peaks else {}),
            **self._mfu(groups, num_epochs),
            **performance.update_metrics(groups, num_epochs, seconds("update"), num_ranks),
            **performance.server_metrics(metrics, num_server_ranks),
            **performance.step_metrics(groups, self.telemetry.step_seconds(), waiting_s, num_ranks, num_other_ranks),
        }

    def _mfu(self, groups: list[Group], num_epochs: int) -> dict[str, float]:
        """Return the MFU of the policy's phases; {} for a GPU of unknown peak."""
        model = self.policy.model
        is_known = is_gpu() and model.config.params_dtype == torch.bfloat16
        peak = peak_flops(torch.cuda.get_device_name()) if is_known else None
        if peak is None:
            return {}
        num_scores = 1 if needs_old_log_probs(self.config) else 0
        works = {
            "perf/mfu/actor": PhaseWork(training_flops, num_epochs, self.telemetry.seconds("update")),
            "perf/mfu/actor_infer": PhaseWork(forward_flops, num_scores, self.telemetry.seconds("old_log_probs")),
        }
        return performance.mfu_metrics(
            model.spec, model.lora, groups, works, num_gpus=self.layout.world_size, peak=peak
        )

    def has_validated(self, step: int) -> bool:
        """Return whether metrics.jsonl has the validation after this step: a resumed run does not
        repeat it.

        Kept answers do not count: they are written up to a step before their figures.
        """
        if step == 0:
            return False
        path = self.run.metrics
        return self.layout.agreement.leader(f"reading {path}", lambda: has_validation(path, step))

    def begin_validation(self, step: int) -> None:
        """Start the validation of the current weights, during the next step's sampling and
        training.

        Without held-out prompts or servers there is none.
        """
        if not (uses_servers(self.config) and self.config.data.val_files):
            return
        with self._saved_if_lost(step, self._num_optimizer_steps), self.telemetry.phase("validation"):
            self._ask_rollout(step, lambda rollout: rollout.begin_evaluation(step, weight_version=step))
        self._validated_step = step

    def finish_validation(self) -> None:
        """Wait for the validation, if one is under way, and log it.

        It is given up if the servers have lost the weights and the trainer has newer ones already.
        """
        step = self._validated_step
        if step is None:
            return
        self._validated_step = None
        updated = max(step, self._updated_step)

        def answers(rollout: BatchSource) -> dict[str, float]:
            try:
                return rollout.evaluate(step, weight_version=step)
            except NeedsSync as reason:
                if updated == step:
                    raise
                print_line(f"The held-out evaluation after step {step} is given up: {reason}")
                return {}

        with self._saved_if_lost(updated, self._num_optimizer_steps), self.telemetry.phase("validation"):
            metrics = self._ask_rollout(step, answers)
        if metrics:
            self.telemetry.log_validation(step, metrics, in_step=updated > step)

    @contextmanager
    def logged_if_lost(self, step: int, metrics: dict[str, float], groups: list[Group] | None) -> Iterator[None]:
        """Log a step's known metrics if an error ends the run inside the block, after its update.
        The step may be saved, and is then not trained again."""
        try:
            yield
        except Exception:
            self.telemetry.log(step, metrics, groups)
            raise

    def save_before_push(self, step: int, metrics: dict[str, float]) -> None:
        """Do the same as `save` on shared GPUs: afterwards the servers have the memory."""
        if self.placement.saves_first:
            self.save(step, metrics)
            self._saved_step = step

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Save a checkpoint if one is due. Raises RunStopped if the run was asked to stop."""
        if step == self._saved_step:
            return
        with self.telemetry.phase("checkpoint"):
            is_stopped = self.checkpoints.after_step(step, _optimizer_steps(metrics))
        if is_stopped:
            raise RunStopped

    def _poll_save(self) -> None:
        """Finish a background save as far as it is ready: a checkpoint gets its name before the
        next step.

        Called between the parts of a step, for the two polls after the tensors and the checksums. A
        killed run goes on from the last named checkpoint.
        """
        with self.telemetry.phase("checkpoint"):
            self.checkpoints.poll()

    def finish(self) -> None:
        """Wait, after the last step, for the background save, then save the model, also after a
        failure of that save. Raises JobError, or UserError, on all ranks."""
        failure: JobError | None = None
        try:
            with self.telemetry.phase("checkpoint"):
                self.checkpoints.finish()  # before the GPUs change hands, which may fail too
        except JobError as error:
            failure = error
        self.placement.to_trainer()
        self._save_model()
        if failure is not None:
            raise failure

    def _save_model(self) -> None:
        """Save the model in the run folder."""
        with self.telemetry.phase("save_model"):
            save_model(self.config, self.run, self.layout, self.policy.model)

    def _ask_rollout(self, version: int, question: Callable[[BatchSource], Answer]) -> Answer | None:
        """Ask the rollout and return its answer, on rank 0; the others wait and return None.

        A server back without the current weights gets them first; then the question is asked again,
        and nothing is lost. Raises RolloutError or UserError on all ranks.
        """
        answer: Answer | None = None

        def needs_sync() -> bool:
            nonlocal answer
            assert self._rollout is not None, "rank 0 has the rollout"
            try:
                answer = question(self._rollout)
            except NeedsSync:
                return True
            return False

        agreement = self.layout.agreement.raising(RolloutError)
        for _ in range(_MAX_SYNCS):
            if not agreement.leader("rollout", needs_sync):
                return answer
            self._num_rejoins += self.placement.push(version).num_rejoins
        raise RolloutError(f"servers still lack weight version {version} after {_MAX_SYNCS} pushes; see their logs.")

    @contextmanager
    def _saved_if_lost(self, step: int, num_steps: int = 0) -> Iterator[None]:
        """Save the last finished step and the samples since, if the rollout ends inside the block.

        It may end for good, or on request. Then its error ends the run, or RunStopped.
        """
        try:
            yield
        except (RolloutError, UserError) as error:
            try:
                self.placement.to_trainer()
                with self.telemetry.phase("checkpoint"):
                    was_handed = isinstance(error, ForeignSamples)
                    is_stopped = self.checkpoints.rescue(step, num_steps, was_handed)
            except (JobError, WeightSyncError) as failure:
                kind = type(error) if isinstance(error, ServersLost) else RolloutError
                raise kind(f"{error} Step {step} could not be saved: {failure}.") from failure
            if not is_stopped:
                raise
            if not isinstance(error, Interrupted) and self.layout.rank == 0:
                print_line(f"When it was stopped, the rollout had failed: {error}")
            raise RunStopped from error


def foreign_samples(
    step: int, mean: float, limit: float, shares: Mapping[int, tuple[float, int]], servers_of: Sequence[tuple[str, ...]]
) -> str:
    """Return the user's sentence on the servers, the worst one first.

    shares: sample_id -> (sum of differences, number of tokens).
    """
    sums: dict[str, list[float]] = {}
    for sample_id, (total, number) in shares.items():
        for server in servers_of[sample_id] or ("a server that the batch does not name",):
            one = sums.setdefault(server, [0.0, 0])
            one[0] += total
            one[1] += number
    means = sorted(((total / number, server) for server, (total, number) in sums.items()), reverse=True)
    named = [f"{server} by {by:.3g}" for by, server in means[:_SHOWN_SERVERS]]
    named += [f"and {len(means) - _SHOWN_SERVERS} more"] if len(means) > _SHOWN_SERVERS else []
    return (
        f"the batch of step {step} is not trained on: the servers' log-probs differ from the trainer's by {mean:.3g} "
        f"in the mean, more than algorithm.rollout_correction.max_mismatch {limit:g} ({'; '.join(named)}); see to it "
        f"that these servers run the trainer's model, and that nobody else steers them, or raise the key."
    )


def _optimizer_steps(metrics: dict[str, float]) -> int:
    """Return the number of optimizer steps of one policy update; 0 while the critic warms up."""
    return int(metrics.get("actor/num_optimizer_steps", 0))


@contextmanager
def running_job(config: Config) -> Iterator[Job]:
    """Join the process groups, start the controller, build the models and yield the job.

    On every way out all of this is taken down again. A RunStopped from the block ends here.
    """
    with joined_ranks(config, _limits(config), _rollout_timeout_s(config)) as ranks, ExitStack() as stack:
        start = locked_start(config, ranks, stack)
        # the controller first: it reads the prompts and waits for the servers while the models are
        # built
        is_leader = ranks.layout.rank == 0
        rollout = start_rollout(config) if is_leader else None
        if rollout is not None:
            stack.callback(rollout.close)
            ranks.watchdog.on_alarm = rollout.dump_stacks
        telemetry = open_telemetry(config, ranks, start) if is_leader else NullTelemetry()
        stack.callback(telemetry.close)
        placement = start_placement(config, ranks.layout, ranks.run, telemetry.phase)
        stack.callback(placement.close)
        if placement.saves_first:  # SGLang's cache is as large as the memory that it finds
            ranks.layout.agreement.raising(RolloutError).leader("rollout", _wait_ready, rollout)
        placement.to_trainer()
        job = Job(config, ranks.layout, telemetry, rollout, ranks.run, start, placement)
        if is_leader:
            print_line(in_use(job.policy.model, job.policy.state))
        yield job


def _wait_ready(rollout: BatchSource | None) -> None:
    assert rollout is not None, "rank 0 has the rollout"
    rollout.wait_ready()


def _rollout_timeout_s(config: Config) -> float:
    """Return the seconds of a rank's wait for rank 0, while rank 0 waits for the rollout."""
    rollout = config.actor_rollout_ref.rollout
    return max(rollout.step_timeout_s, rollout.server.startup_timeout_s) + _GRACE_S


def _limits(config: Config) -> dict[str, float]:
    """Return the time limit of each phase in seconds.

    Computing phases have a collective's limit, from one micro-batch to the next. A push of weights
    has twice its deadline, from the arrival of all ranks. All other phases have the rollout's
    limit.
    """
    timeout_s = config.actor_rollout_ref.actor.megatron.timeout_s
    return dict.fromkeys(_COMPUTING, timeout_s) | {"weight_sync": 2 * config.weight_sync.timeout_s + HANG_MARGIN_S}
