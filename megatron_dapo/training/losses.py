"""The actor's loss of a micro-batch: the head's task, and its result for Megatron."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.algorithms.aggregation import token_weights
from megatron_dapo.algorithms.dapo_loss import (
    ENTROPY,
    ENTROPY_SAMPLED,
    LOSS,
    LossConfig,
    TokenBatch,
    TokenOutputs,
    dapo_loss,
    metric_names,
)
from megatron_dapo.algorithms.metrics import DERIVED, Sums, stack_maxima, stack_sums, token_mean
from megatron_dapo.algorithms.mismatch_sums import mismatch_sums
from megatron_dapo.algorithms.rollout_correction import Segments
from megatron_dapo.algorithms.sequence_loss import (
    LossSequence,
    SequenceLossFunction,
    checked_answer,
)
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.key_names import LOSS_FUNCTION
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.kernels.fused_head import HeadLoss
from megatron_dapo.kernels.row_plan import to_device
from megatron_dapo.models.log_prob_head import LossTask, Scores, ScoreTask, at_rows
from megatron_dapo.training.expert_load_metrics import LOAD_METRICS
from megatron_dapo.training.metric_sums import MetricSums
from megatron_dapo.training.mismatch import all_mismatch_sums, compared, stale
from megatron_dapo.training.schedule import kl_reference

# metrics that `Policy.update` adds to those of the loss
_OF_THE_UPDATE = (
    "actor/grad_norm",
    "actor/lr",
    "actor/num_optimizer_steps",
    "actor/router_mismatch",
    *LOAD_METRICS,
)


class MicroBatchLoss(Protocol):
    """The two ends of a training pass on the last stage."""

    def task(self, batch: MicroBatch) -> LossTask | ScoreTask:
        """Return the head's task."""
        ...

    def finish(self, answer: Any, batch: MicroBatch) -> tuple[Tensor, Tensor, MetricSums]:
        """Return Megatron's (summed loss, count) of the head's answer to the task, and metric
        sums."""
        ...


@dataclass(frozen=True)
class _BuiltInLoss:
    """The loss of `algorithms.dapo_loss`."""

    config: LossConfig
    aggregation: str
    max_response_length: int
    temperature: float
    weight_version: int = 0
    """Of the weights behind the samples compared with the servers."""

    def tokens(self, batch: MicroBatch) -> TokenBatch:
        """Return the loss's inputs per token."""
        weights, count = token_weights(
            self.aggregation,
            batch.loss_mask,
            batch.segment_ids,
            batch.num_segments,
            self.max_response_length,
            num_elsewhere=batch.num_elsewhere,
            stands=batch.stands,
        )
        return TokenBatch(
            weights=weights,
            count=count,
            advantages=batch.advantages,
            old_log_probs=batch.rollout_log_probs if self.config.bypass_mode else batch.old_log_probs,
            ref_log_probs=batch.ref_log_probs,
            rollout_log_probs=batch.rollout_log_probs,
            is_current=compared(batch, self.weight_version),
            is_stale=stale(batch, self.weight_version) if self.config.report_stale else None,
            importance=None if batch.correction is None else batch.correction.importance,
            exp_mask=None if self.config.off_policy is None else batch.exp_mask,
        )

    def metrics(self, batch: MicroBatch, sums: Tensor, maxima: Tensor) -> MetricSums:
        """Return the metric sums of the loss, and of the tokens' correction factors."""
        metrics = MetricSums(*metric_names(self.config), sums, maxima)
        return metrics if batch.correction is None else metrics.with_sums(batch.correction.sums)

    def mismatch_of_all(self, batch: MicroBatch, log_probs: Tensor) -> Sums:
        """Return the metric sums of the comparison with the servers, including older weights'
        tokens. log_probs: the current ones [B, S]; they replace missing old ones, as in the loss.
        """
        old = None if self.config.bypass_mode else batch.old_log_probs
        return all_mismatch_sums(batch, log_probs.detach() if old is None else old, self.weight_version)


class TokenSumLoss(_BuiltInLoss):
    """A sum over tokens, each independent of the others: the head computes it itself."""

    def task(self, batch: MicroBatch) -> LossTask:
        """Return the loss task with the inputs per token."""
        return LossTask(
            batch.targets,
            batch.counted_rows,
            self.temperature,
            tokens=self.tokens(batch),
            loss=self.config,
            kl_reference=kl_reference(batch) if self.config.use_full_kl else None,
        )

    def finish(self, answer: HeadLoss, batch: MicroBatch) -> tuple[Tensor, Tensor, MetricSums]:
        """Return the head's loss as Megatron takes it with calculate_per_token_loss, and its metric
        sums."""
        metrics = self.metrics(batch, answer.sums, answer.maxima)
        if self.config.report_stale:
            assert answer.log_probs is not None, "they are asked for by `LossConfig.report_stale`"
            rows = to_device(batch.counted_rows, answer.log_probs.device)
            log_probs = at_rows(answer.log_probs, rows, batch.tokens.shape)
            metrics = metrics.with_sums(self.mismatch_of_all(batch, log_probs))
        return answer.loss_sum, answer.count.int(), metrics


class _LogLikelihoodLoss(TokenSumLoss):
    """-log-prob of every counted token, for text by a person or another model. Its `loss_config` is
    a fine-tuning run's: cispo with advantages of 1 and no old policy."""

    def tokens(self, batch: MicroBatch) -> TokenBatch:
        """Return the tokens, all of the same weight."""
        weights, count = token_weights(
            self.aggregation, batch.loss_mask, batch.segment_ids, batch.num_segments, self.max_response_length
        )
        return TokenBatch(weights=weights, count=count, advantages=torch.ones_like(weights))

    def metrics(self, batch: MicroBatch, sums: Tensor, maxima: Tensor) -> MetricSums:
        """Return the loss and the entropy, the only meaningful metrics here."""
        names, _ = metric_names(self.config)
        shown = {LOSS: "train/loss", ENTROPY: ENTROPY}
        rows = [row for row, name in enumerate(names) if name in shown]
        return MetricSums(tuple(shown[names[row]] for row in rows), (), sums[rows], maxima[:0])


class SequenceRatioLoss(_BuiltInLoss):
    """The loss with one ratio per sequence (GSPO).

    The ratio needs the sequence's last log-prob. So the head returns log-probs, and autograd sends
    gradients back, as for the user's own loss.
    """

    def task(self, batch: MicroBatch) -> ScoreTask:
        """Return the task that asks for log-probs with gradient."""
        return ScoreTask(
            batch.targets,
            batch.counted_rows,
            self.temperature,
            kl_reference=kl_reference(batch) if self.config.use_full_kl else None,
            with_gradient=True,
            want_entropy=self.config.report_entropy,
        )

    def finish(self, answer: Scores, batch: MicroBatch) -> tuple[Tensor, Tensor, MetricSums]:
        """Return the loss of the log-probs as Megatron takes it with calculate_per_token_loss, and
        its metric sums."""
        tokens = self.tokens(batch)
        log_ratio = sequence_log_ratio(answer.log_probs, tokens.old_log_probs, batch)
        tokens = replace(tokens, sequence_log_ratio=log_ratio)
        outputs = TokenOutputs(answer.log_probs, answer.entropy, answer.full_kl)
        loss_sum, sums, maxima = dapo_loss(outputs, tokens, self.config)
        sum_names, max_names = metric_names(self.config)
        device = loss_sum.device
        stacked = stack_sums(sums, sum_names, device), stack_maxima(maxima, max_names, device)
        metrics = self.metrics(batch, *stacked)
        if self.config.report_stale:
            metrics = metrics.with_sums(self.mismatch_of_all(batch, answer.log_probs))
        return loss_sum, tokens.count.int(), metrics


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor | None, batch: MicroBatch) -> Tensor:
    """Return each sample's mean of log_probs - old_log_probs, without gradient.

    The result has the shape of `tokens`. At every counted token it is the mean over the counted
    tokens of its sample. It is 0 elsewhere, and everywhere without old log-probs.
    """
    if old_log_probs is None:
        return torch.zeros_like(log_probs)
    counted = batch.loss_mask != 0
    segments = Segments(counted, batch.segment_ids, batch.num_segments)
    means = segments.mean(log_probs.detach() - old_log_probs)
    return torch.where(counted, segments.spread(means), 0).to(log_probs.dtype)


@dataclass(frozen=True)
class SequenceSumLoss:
    """The user's own loss over the log-probs of whole sequences, differentiated by autograd."""

    function: SequenceLossFunction
    temperature: float
    with_entropy: bool
    report_stale: bool = False
    weight_version: int = 0

    def task(self, batch: MicroBatch) -> ScoreTask:
        """Return the task that asks for log-probs with gradient."""
        return ScoreTask(
            batch.targets,
            batch.counted_rows,
            self.temperature,
            with_gradient=True,
            want_entropy=self.with_entropy,
        )

    def finish(self, answer: Scores, batch: MicroBatch) -> tuple[Tensor, Tensor, MetricSums]:
        """Return the function's result for the sequences; 0 with gradient 0 for a micro-batch
        without any."""
        log_probs = answer.log_probs
        sequences = loss_sequences(answer, batch)
        loss_sum = 0.0 * log_probs.sum()
        count = loss_sum.new_zeros((), dtype=torch.float64)
        reported: Sums = {}
        if sequences:
            own_sum, number, metrics = checked_answer(LOSS_FUNCTION, self.function(sequences))
            loss_sum = loss_sum + own_sum  # of a plain number or a constant the gradient is 0
            count = _scalar(number, log_probs)
            torch._assert_async(count == count.round(), f"{LOSS_FUNCTION} must return a whole number as its count")
            reported = {
                name: (_scalar(total, log_probs), _scalar(n, log_probs)) for name, (total, n) in metrics.items()
            }
        counted = batch.loss_mask != 0
        sums: Sums = {
            LOSS: (loss_sum.detach().double(), count),
            ENTROPY_SAMPLED: token_mean(-log_probs, counted),
        }
        if answer.entropy is not None:
            sums[ENTROPY] = token_mean(answer.entropy, counted)
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        older = None
        if self.report_stale:
            older = stale(batch, self.weight_version)
            sums |= all_mismatch_sums(batch, old, self.weight_version)
        mismatch, maxima = mismatch_sums(old, batch.rollout_log_probs, compared(batch, self.weight_version), older)
        sums |= mismatch
        taken = sorted({*sums, *maxima, *DERIVED, *_OF_THE_UPDATE} & reported.keys())
        if taken:
            raise UserError(f"{LOSS_FUNCTION}: {', '.join(taken)} is a metric of ours; give yours another name.")
        sums |= reported
        device = log_probs.device
        stacked = stack_sums(sums, tuple(sums), device), stack_maxima(maxima, tuple(maxima), device)
        return loss_sum, count.int(), MetricSums(tuple(sums), tuple(maxima), *stacked)


def loss_sequences(answer: Scores, batch: MicroBatch) -> list[LossSequence]:
    """Cut a micro-batch into its sequences that have counted tokens, without reading from the
    device."""
    log_probs = batch.by_sample(answer.log_probs)
    old = answer.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    old_log_probs = batch.by_sample(old)
    rollout_log_probs = batch.by_sample(batch.rollout_log_probs)
    ref_log_probs = {} if batch.ref_log_probs is None else batch.by_sample(batch.ref_log_probs)
    entropy = {} if answer.entropy is None else batch.by_sample(answer.entropy)
    advantages = batch.by_sample(batch.advantages)
    mask = batch.by_sample(batch.loss_mask)
    sequences = []
    for sample_id, span in _counted_spans(batch).items():
        sequences.append(
            LossSequence(
                log_probs=log_probs[sample_id][span],
                old_log_probs=old_log_probs[sample_id][span],
                rollout_log_probs=rollout_log_probs[sample_id][span],
                ref_log_probs=ref_log_probs[sample_id][span] if ref_log_probs else None,
                advantages=advantages[sample_id][span],
                mask=mask[sample_id][span],
                entropy=entropy[sample_id][span] if entropy else None,
            )
        )
    return sequences


def _counted_spans(batch: MicroBatch) -> dict[int, slice]:
    """Return sample_id -> from its first counted token to its last, of the samples that have
    any."""
    is_counted = np.zeros(batch.tokens.shape[::-1], dtype=bool)
    is_counted.reshape(-1)[batch.counted_rows] = True  # in Megatron's order, s * B + b
    spans = {}
    for sample_id, flags in batch.by_sample(torch.from_numpy(is_counted.T.copy())).items():
        places = np.flatnonzero(flags.numpy())
        if len(places):
            spans[sample_id] = slice(int(places[0]), int(places[-1]) + 1)
    return spans


def _scalar(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, device=like.device).detach().double()


def make_loss(config: Config, loss_config: LossConfig) -> TokenSumLoss | SequenceRatioLoss | SequenceSumLoss:
    """Return the loss that the config asks for."""
    actor = config.actor_rollout_ref.actor
    temperature = config.actor_rollout_ref.rollout.temperature
    if actor.loss_function is not None:
        own = OwnFunction.load(LOSS_FUNCTION, actor.loss_function)
        function = partial(own, lambda answer: answer, "loss, count and metrics", "a micro-batch")
        return SequenceSumLoss(function, temperature, actor.calculate_entropy, loss_config.report_stale)
    if config.sft.enable:
        return _LogLikelihoodLoss(loss_config, "token-mean", config.data.max_response_length, temperature)
    built_in = SequenceRatioLoss if loss_config.is_over_sequences else TokenSumLoss
    return built_in(loss_config, actor.loss_agg_mode, config.data.max_response_length, temperature)
