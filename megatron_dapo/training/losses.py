"""The actor's loss of a micro-batch: what the head is asked, and what Megatron gets of its answer."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_dapo.algorithms.aggregation import token_weights
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, metric_names
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.kernels.fused_head import HeadLoss
from megatron_dapo.models.log_prob_head import LossTask, ScoreTask
from megatron_dapo.training.metric_sums import MetricSums
from megatron_dapo.training.mismatch import compared
from megatron_dapo.training.schedule import kl_reference


class MicroBatchLoss(Protocol):
    """The two ends of a training pass on the last stage."""

    def task(self, batch: MicroBatch) -> LossTask | ScoreTask:
        """Return what the head is asked."""
        ...

    def finish(self, answer: HeadLoss, batch: MicroBatch) -> tuple[Tensor, Tensor, MetricSums]:
        """Return Megatron's (summed loss, count) of the head's answer, and metric sums."""
        ...


@dataclass(frozen=True)
class TokenSumLoss:
    """The loss of `algorithms.dapo_loss`, a sum over tokens, which the head computes by itself.

    weight_version: of the weights that wrote the samples which are compared with the servers.
    """

    config: LossConfig
    aggregation: str
    max_response_length: int
    temperature: float
    weight_version: int = 0

    def task(self, batch: MicroBatch) -> LossTask:
        """Return the loss task with everything that is known of the tokens."""
        weights, count = token_weights(
            self.aggregation, batch.loss_mask, batch.segment_ids, batch.num_segments, self.max_response_length
        )
        tokens = TokenBatch(
            weights=weights,
            count=count,
            advantages=batch.advantages,
            old_log_probs=batch.old_log_probs,
            ref_log_probs=batch.ref_log_probs,
            rollout_log_probs=batch.rollout_log_probs,
            is_current=compared(batch, self.weight_version),
            exp_mask=None if self.config.off_policy is None else batch.exp_mask,
        )
        return LossTask(
            batch.targets,
            batch.counted_rows,
            self.temperature,
            tokens=tokens,
            loss=self.config,
            kl_reference=kl_reference(batch) if self.config.use_full_kl else None,
        )

    def finish(self, answer: HeadLoss, batch: MicroBatch) -> tuple[Tensor, Tensor, MetricSums]:
        """Return the head's loss as Megatron takes it with calculate_per_token_loss, and its metric sums."""
        metrics = MetricSums(*metric_names(self.config), answer.sums, answer.maxima)
        return answer.loss_sum, answer.count.int(), metrics
