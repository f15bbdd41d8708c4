"""The critic: values of every counted token, and one optimizer step of the value loss per
mini-batch."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dapo.algorithms.aggregation import token_weights
from megatron_dapo.algorithms.metrics import stack_sums
from megatron_dapo.algorithms.value_loss import explained_variance_sums, value_loss
from megatron_dapo.config.derived import critic_batching, critic_path
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.huggingface.spec_reader import read_critic_spec
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.distribute import StepShard
from megatron_dapo.training.metric_sums import MetricSums
from megatron_dapo.training.optimizer import make_training_state, step_threads
from megatron_dapo.training.policy import MiniBatch, WeightLoader
from megatron_dapo.training.schedule import run_micro_batches


class Critic:
    """A model with a value head in the actor's layout, with a separate optimizer.

    Every method is collective over all ranks. The critic's own cut into micro-batches is
    `StepShard.critic_mini_batches`; values and returns are transferred between the cuts by sample.
    """

    def __init__(self, config: Config, layout: ParallelLayout, load: WeightLoader = load_hf_weights) -> None:
        megatron = config.actor_rollout_ref.actor.megatron
        path = critic_path(config)
        self.layout = layout
        self.model = build_model(read_critic_spec(path), layout, megatron)
        load(self.model, path, layout)
        num_steps = config.trainer.total_training_steps
        threads = step_threads(megatron, layout)
        self.state = make_training_state(self.model, megatron, config.critic.optim, num_steps, threads)
        self._config = config.critic
        self._num_epochs = critic_batching(config).ppo_epochs

    @torch.no_grad()
    def score(self, shard: StepShard) -> StepShard:
        """Return the shard with values in the actor's micro-batches: on the last stage, as all that
        the loss needs."""
        batches = [batch for mini_batch in shard.critic_mini_batches for batch in mini_batch]

        def finish(values: Tensor, batch: MicroBatch) -> Tensor:
            return torch.where(batch.loss_mask != 0, values, 0.0)

        answers = run_micro_batches(self.state.stages, batches, finish, forward_only=True)
        if self.model.head is None:
            return shard
        values = _by_sample(zip(batches, answers, strict=True))
        return shard.with_mini_batches(
            [[replace(batch, values=batch.from_samples(values)) for batch in mini] for mini in shard.mini_batches]
        )

    def update(self, shard: StepShard) -> dict[str, float]:
        """Take one optimizer step per mini-batch and epoch, towards the shard's returns. Return the
        critic's metrics over all of them, on every rank; explained_variance is of the values before
        the update."""
        self.state.lr_schedule.step(increment=1)
        parts, norms = [], []
        mini_batches = self.with_targets(shard)
        for _ in range(self._num_epochs):
            for mini_batch in mini_batches:
                parts.append(self.accumulate_gradients(mini_batch))
                norms.append(self.state.step())
        self.state.finish_gathers()
        metrics = self.metrics_of(MetricSums.merge(parts))
        metrics["critic/grad_norm"] = sum(norms) / len(norms)
        metrics["critic/lr"] = self.state.lr
        return metrics

    def with_targets(self, shard: StepShard) -> list[MiniBatch]:
        """Return the critic's mini-batches with the old values and returns of the actor's.

        They are filled in on the last stage, which computes the loss.
        """
        if self.model.head is None:
            return shard.critic_mini_batches
        batches = [batch for mini_batch in shard.mini_batches for batch in mini_batch]
        values = _by_sample((batch, _present(batch.values)) for batch in batches)
        returns = _by_sample((batch, _present(batch.returns)) for batch in batches)

        def filled(batch: MicroBatch) -> MicroBatch:
            return replace(batch, values=batch.from_samples(values), returns=batch.from_samples(returns))

        return [[filled(batch) for batch in mini_batch] for mini_batch in shard.critic_mini_batches]

    def accumulate_gradients(self, mini_batch: MiniBatch) -> MetricSums | None:
        """Leave the gradients of one mini-batch in main_grad, reduced over the ranks: of the mean
        over its counted tokens. Returns this rank's own metric sums, on the last stage."""
        self.state.zero_gradients()
        parts = run_micro_batches(self.state.stages, mini_batch, self._loss, forward_only=False)
        return MetricSums.merge(parts)

    def _loss(self, values: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, MetricSums]:
        """Return (summed loss, tokens, metric sums) of one micro-batch."""
        weights, count = token_weights("token-mean", batch.loss_mask, batch.segment_ids, batch.num_segments, 1)
        old_values = _present(batch.values)
        returns = _present(batch.returns)
        clip = self._config.cliprange_value
        loss = value_loss(values, old_values, returns, weights, count, clip=clip, loss_type=self._config.loss_type)
        sums = loss.sums | explained_variance_sums(old_values, returns, weights != 0)
        no_maxima = values.new_zeros(0, dtype=torch.float64)
        part = MetricSums(tuple(sums), (), stack_sums(sums, tuple(sums), values.device), no_maxima)
        return self._config.value_loss_coef * loss.loss_sum, count.int(), part

    def metrics_of(self, part: MetricSums | None) -> dict[str, float]:
        """Return named means over all ranks. Collective."""
        return MetricSums.all_reduce(part, self.layout).means()


def _present(estimates: Tensor | None) -> Tensor:
    assert estimates is not None, "the critic has scored this batch, and its advantages were estimated"
    return estimates


def _by_sample(pairs: Iterator[tuple[MicroBatch, Tensor]]) -> dict[int, Tensor]:
    """Return sample_id -> [L], of (micro-batch, values of the shape of its tokens)."""
    return {sample: cut for batch, values in pairs for sample, cut in batch.by_sample(values).items()}
