"""The actor: old log-probs, and one optimizer step per mini-batch."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithms.metrics import stack_sums, token_mean
from megatron_dapo.algorithms.mismatch_sums import MEAN_MISMATCH, MEAN_MISMATCH_ALL
from megatron_dapo.algorithms.policy_loss import EXP_MASK_RATIO, OFF_POLICY_LOSS
from megatron_dapo.algorithms.rollout_correction import RolloutCorrection, rollout_correction
from megatron_dapo.config.derived import needs_old_log_probs, tokens_multiple, uses_full_kl_in_reward
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.huggingface.lora_settings import lora_settings
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import ModelParts, build_model
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.models.log_prob_head import Scores
from megatron_dapo.models.peft_folder import load_adapters
from megatron_dapo.models.router_replay import ChunkReplay
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.expert_load_metrics import expert_load_metrics
from megatron_dapo.training.head_options import head_options
from megatron_dapo.training.loss_config import correction_per_step, loss_config
from megatron_dapo.training.losses import MicroBatchLoss, make_loss
from megatron_dapo.training.metric_sums import MetricSums
from megatron_dapo.training.mismatch import (
    Shares,
    difference_sums,
    mean_over_ranks,
    shares_of,
    step_warnings,
)
from megatron_dapo.training.optimizer import make_training_state, step_threads
from megatron_dapo.training.schedule import Schedule, run_micro_batches

log = logging.getLogger(__name__)

MiniBatch = list[MicroBatch]
# fills a model from `model.path` or `ref.path`
WeightLoader = Callable[[ModelParts, str, ParallelLayout], None]


class Policy:
    """The actor's model, its optimizer, and the loss that ties them.

    Every method is collective over all ranks; each rank brings its own shard, with equal numbers of
    micro-batches.
    """

    def __init__(self, config: Config, layout: ParallelLayout, load: WeightLoader = load_hf_weights) -> None:
        actor = config.actor_rollout_ref.actor
        rollout = config.actor_rollout_ref.rollout
        path = config.actor_rollout_ref.model.path
        self.layout = layout
        spec = read_model_spec(path)
        replay = actor.router_replay
        self.model = build_model(
            spec,
            layout,
            actor.megatron,
            **head_options(config, layout, spec),
            num_tokens=tokens_multiple(config, layout.sequence_multiple),
            replay_routers=replay != "off",
            lora=lora_settings(config),
        )
        load(self.model, path, layout)
        if adapter := config.actor_rollout_ref.model.lora_adapter_path:
            load_adapters(self.model, layout, adapter)
        num_steps = config.trainer.total_training_steps - config.trainer.critic_warmup
        threads = step_threads(actor.megatron, layout)
        self.state = make_training_state(self.model, actor.megatron, actor.optim, num_steps, threads)
        self.loss_config = loss_config(config)
        self._loss = make_loss(config, self.loss_config)
        self.schedule = Schedule(self.model, self.state.stages, rollout.temperature)
        self._needs_old = needs_old_log_probs(config)
        self._correction = correction_per_step(config)
        self._checks_stale = self.loss_config.report_stale  # as the algorithm's `max_mismatch` does
        self._full_kl_in_reward = uses_full_kl_in_reward(config)
        self._records_experts = replay == "old"
        self._num_epochs = actor.ppo_epochs
        self._is_fine_tuning = config.sft.enable
        self._warnings = partial(step_warnings, config)

    def weight_source(self) -> WeightSource:
        """Return the current weights of this rank's stage, under their Hugging Face names."""
        return WeightSource(self.model, self.layout)

    def score(self, mini_batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Return the same mini-batches with old log-probs on the last stage, the place of the loss.

        Old log-probs are the current policy's; of replayed samples the recorded ones of their
        policy. Mini-batches stay as they are if the loss needs none. With one optimizer step per
        rollout step the old policy is the current one; with bypass_mode the servers' log-probs are
        taken for old.

        Also filled in, if configured: the KL over the whole vocabulary, to the reference that
        scored before, and the rollout correction's factor of each token. With router_replay "old"
        so is, on every stage, this pass's choice of experts.
        """
        if not self._needs_old:
            return list(mini_batches)

        def fill(batch: MicroBatch, scores: Scores) -> MicroBatch:
            batch = replace(batch, old_log_probs=scores.log_probs, full_kl=scores.full_kl).with_recorded_log_probs()
            batch = batch if self._correction is None else corrected(batch, self._correction)
            return batch if self.loss_config.use_full_kl else replace(batch, ref_hidden=None, ref_weight=None)

        extras = dict(full_kl=self._full_kl_in_reward, record_experts=self._records_experts)
        return with_scores(self.schedule, mini_batches, fill, **extras)

    def mean_mismatch(self, mini_batches: Sequence[MiniBatch], weight_version: int) -> float:
        """Return the mean of |old - server's log-prob| over the tokens of this weight version, and
        with max_staleness above 0 of older ones too. It is the same on every rank. The mini-batches
        need old log-probs."""
        sums = difference_sums(chain(*mini_batches), weight_version, with_stale=self._checks_stale)
        return mean_over_ranks(sums, self.layout, self._device)

    def mismatch_by_sample(self, mini_batches: Sequence[MiniBatch], weight_version: int) -> Shares:
        """Return the same by sample, of all ranks, by another forward pass with the weights that
        began the step."""
        batches = list(chain(*mini_batches))
        log_probs = self.schedule.log_probs(batches)
        own_shares: Shares = {}
        if log_probs and self.layout.counts_tokens:
            own_shares = shares_of(batches, log_probs, weight_version, with_stale=self._checks_stale)
        return {sample_id: share for shares in self.layout.gather(own_shares) for sample_id, share in shares.items()}

    def update(
        self,
        mini_batches: Sequence[MiniBatch],
        weight_version: int,
        check: Callable[[float], None] | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch and epoch. Return the actor's metrics over all of
        them, on every rank.

        Args:
            weight_version: of the initial weights, which the servers have.
            check: gets the `mean_mismatch` of the first mini-batch before anything changes, and may
                raise, on all ranks.
        """
        loss = replace(self._loss, weight_version=weight_version)
        replays = [chunk.router_replay for chunk in self.model.chunks if chunk.router_replay is not None]
        for chunk_replay in replays:
            chunk_replay.differences = None
        for chunk in self.model.chunks:
            if chunk.expert_load is not None:
                chunk.expert_load.reset()
        parts: list[MetricSums | None] = []
        norms: list[float] = []
        for _ in range(self._num_epochs):
            for mini_batch in mini_batches:
                parts.append(self.accumulate_gradients(mini_batch, loss))
                if not norms:
                    if check is not None:
                        check(mean_over_ranks(self._difference_sums(parts[0]), self.layout, self._device))
                    self.state.lr_schedule.step(increment=1)
                norms.append(self.state.step())
        self.state.finish_gathers()
        part = MetricSums.all_reduce(MetricSums.merge(parts), self.layout)
        metrics = part.means() if self._is_fine_tuning else self.metrics_of(part)
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/lr"] = self.state.lr
        metrics["actor/num_optimizer_steps"] = float(len(norms))
        if replays:
            metrics["actor/router_mismatch"] = self._router_mismatch(replays)
        if self.model.spec.moe is not None:
            metrics |= expert_load_metrics(self.model, self._device)
        if self.layout.rank == 0:
            for warning in self._warnings(metrics):
                log.warning("Step %d: %s", weight_version + 1, warning)
        return metrics

    def accumulate_gradients(self, mini_batch: MiniBatch, loss: MicroBatchLoss | None = None) -> MetricSums | None:
        """Leave the gradients of one mini-batch in main_grad, reduced over the ranks. loss: another
        than the policy's.

        Returns this rank's own metric sums, on the last stage.
        """
        loss = loss or self._loss
        self.state.zero_gradients()
        parts = run_micro_batches(self.state.stages, mini_batch, loss.finish, task=loss.task, forward_only=False)
        return MetricSums.merge(parts)

    def _router_mismatch(self, replays: Sequence[ChunkReplay]) -> float:
        """Return the share of replayed (token, layer) pairs that the routers would send elsewhere.

        It counts from the start of the update. Collective over all ranks, each with its layers and
        tokens.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=self._device)
        for replay in replays:
            replay.assert_recomputed()
            if replay.differences is not None:
                counts += replay.differences
        dist.all_reduce(counts)
        num_different, number = counts.tolist()
        return num_different / number if number else 0.0

    @property
    def _device(self) -> torch.device:
        return next(self.model.chunks[0].parameters()).device

    def _difference_sums(self, part: MetricSums | None) -> Tensor | None:
        name = MEAN_MISMATCH_ALL if self._checks_stale else MEAN_MISMATCH
        return None if part is None else part.sums[part.sum_names.index(name)]

    @staticmethod
    def metrics_of(part: MetricSums) -> dict[str, float]:
        """Return named means and maxima. Without replayed tokens, their part is 0, not absent."""
        return {OFF_POLICY_LOSS: 0.0, EXP_MASK_RATIO: 0.0, **part.means()}

    def held_out_loss(self, parts: Iterable[Sequence[MicroBatch]]) -> dict[str, float]:
        """Return the mean of -log-prob over all counted tokens of all ranks, the same on every
        rank. Collective.

        parts: this rank's micro-batches, some at a time, equally many on every rank.
        """
        sums: list[MetricSums | None] = []
        for batches in parts:
            for batch, log_probs in zip(batches, self.schedule.log_probs(batches) or (), strict=False):
                pair = token_mean(-log_probs, batch.loss_mask != 0)
                stacked = stack_sums({"val/loss": pair}, ("val/loss",), log_probs.device)
                sums.append(MetricSums(("val/loss",), (), stacked, stacked.new_zeros(0)))
        return MetricSums.all_reduce(MetricSums.merge(sums), self.layout).means()


def corrected(batch: MicroBatch, correction: RolloutCorrection) -> MicroBatch:
    """Return the micro-batch with its tokens' correction factors; it needs old log-probs.

    A micro-batch has whole sequences, so this needs no other rank.
    """
    assert batch.old_log_probs is not None, "a correction compares old log-probs with the servers'"
    answer = rollout_correction(
        batch.old_log_probs,
        batch.rollout_log_probs,
        batch.loss_mask,
        batch.segment_ids,
        batch.num_segments,
        correction,
    )
    return replace(batch, correction=answer)


def with_scores(
    schedule: Schedule,
    mini_batches: Sequence[MiniBatch],
    fill: Callable[[MicroBatch, Scores], MicroBatch],
    **options: bool,
) -> list[MiniBatch]:
    """Return the mini-batches with their scores filled in on the last stage; one pass over all
    micro-batches. options: of `Schedule.scores`."""
    flat = [batch for mini_batch in mini_batches for batch in mini_batch]
    scores = schedule.scores(flat, **options)
    if scores is None:
        return list(mini_batches)
    filled = iter([fill(batch, score) for batch, score in zip(flat, scores, strict=True)])
    return [[next(filled) for _ in mini_batch] for mini_batch in mini_batches]
