"""Cuts samples into the ranks' micro-batches, by length only, under the cap of the config."""

from collections.abc import Sequence

from megatron_dapo.config.derived import tokens_multiple
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import CostModel, TrainSample
from megatron_dapo.data.bins import Bins
from megatron_dapo.data.packing import ACTOR_CAP, MicroBatch, collate, schedule, schedule_shards
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import attention_weights
from megatron_dapo.platform.device import device
from megatron_dapo.platform.parallel import ParallelLayout


class Cutter:
    """The cut of a run: padding, cap and cost follow from its config, layout and model."""

    def __init__(self, config: Config, layout: ParallelLayout, spec: ModelSpec) -> None:
        self._packed = config.actor_rollout_ref.model.use_remove_padding
        self._max_tokens = config.actor_rollout_ref.actor.max_tokens_per_microbatch
        self._dp = layout.dp
        self._padding = dict(
            pad_multiple=tokens_multiple(config, layout.sequence_multiple), segment_multiple=layout.segment_multiple
        )
        # the interleaved schedule deals micro-batches to the stages in rounds
        self.num_microbatches_multiple = layout.pp if layout.vpp else 1
        share = spec.num_attention_layers / spec.num_layers
        self._cost = CostModel.of_decoder(
            hidden_size=spec.hidden_size,
            ffn_size=round(spec.mean_active_ffn_size),
            attention_weights=attention_weights(spec),
            attention_width=share * spec.num_heads * (spec.head_dim + spec.value_dim) / 2,
        )

    def schedule(self, samples: Sequence[TrainSample]) -> list[Bins]:
        """Return [dp] lists of micro-batches; see `packing.schedule`."""
        return schedule(samples, dp_size=self._dp, max_tokens=self._max_tokens, **self._cutting())

    def schedule_shards(
        self, shards: Sequence[Sequence[TrainSample]], max_tokens: int, cap_key: str = ACTOR_CAP
    ) -> list[Bins]:
        """Return the same for a fixed assignment of samples to ranks, under a separate cap."""
        return schedule_shards(shards, max_tokens=max_tokens, cap_key=cap_key, **self._cutting())

    def collated(self, bins: Bins) -> list[MicroBatch]:
        """Return the micro-batches of a rank, on its device."""
        return [collate(bin_, packed=self._packed, **self._padding).to(device()) for bin_ in bins]

    def _cutting(self) -> dict:
        return dict(
            **self._padding,
            packed=self._packed,
            num_microbatches_multiple=self.num_microbatches_multiple,
            cost=self._cost,
        )
