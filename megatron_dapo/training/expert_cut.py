"""Cuts the replayed experts of a rank's tokens and layers out of those of whole responses."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.key_names import ROUTER_REPLAY
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import TrainSample
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.models.context_parallel import rank_places
from megatron_dapo.models.router_replay import UNKNOWN
from megatron_dapo.platform.device import is_gpu
from megatron_dapo.platform.parallel import ParallelLayout

log = logging.getLogger(__name__)

MiniBatch = list[MicroBatch]


@dataclass(frozen=True)
class ExpertCut:
    """The cut of replayed experts."""

    shape: RouterShape
    layers: tuple[int, ...]
    """Numbers, from 0, of this rank's layers with experts."""
    layout: ParallelLayout
    from_servers: bool
    """Whether the servers chose the experts; else they are to be recorded."""

    @classmethod
    def make(
        cls, config: Config, spec: ModelSpec, layers: tuple[int, ...], layout: ParallelLayout
    ) -> "ExpertCut | None":
        """Return the cut of this rank, or None without router replay."""
        mode = config.actor_rollout_ref.actor.router_replay
        return None if mode == "off" else cls(RouterShape.of(spec), layers, layout, from_servers=mode == "rollout")

    def experts(self, samples: Sequence[TrainSample], batch: MicroBatch) -> Tensor:
        """Return `RouterPass.experts` of a micro-batch of these samples, in host memory.

        UNKNOWN in padding, at a sample's last token, and for samples without experts; 0 for experts
        still to be recorded.
        """
        shape = (batch.tokens.numel(), len(self.layers), self.shape.moe.experts_per_token)
        rows = np.full(shape, UNKNOWN, dtype=np.int16)
        start = 0
        for sample, width in zip(samples, batch.widths, strict=False):
            # not strict: padding is one segment more
            end = start + sample.length - 1
            if not self.from_servers:
                rows[start:end] = 0
            elif len(sample.routed_experts):
                rows[start:end] = self.shape.rows(sample.routed_experts, self.layers)
            start += width
        experts = torch.from_numpy(rows[self._places(batch)])
        return experts.pin_memory() if is_gpu() else experts

    def _places(self, batch: MicroBatch) -> np.ndarray:
        """Return the places in the flat tensors of the tokens that this rank's routers meet, in
        Megatron's order."""
        layout = self.layout
        if layout.cp > 1:
            places = rank_places(batch.widths, layout.cp_rank, layout.cp)
        else:
            places = np.arange(batch.tokens.numel()).reshape(batch.tokens.shape).T.reshape(-1)
        return places.reshape(layout.tp, -1)[layout.tp_rank] if layout.sp else places

    def added(self, bins: Sequence[Sequence[Sequence[TrainSample]]], mini_batches: list[MiniBatch]) -> list[MiniBatch]:
        """Return the mini-batches with the experts of their samples,
        bins[mini-batch][micro-batch]."""
        return [
            [
                replace(batch, experts=self.experts(samples, batch))
                for samples, batch in zip(of_mini_batch, mini_batch, strict=True)
            ]
            for of_mini_batch, mini_batch in zip(bins, mini_batches, strict=True)
        ]

    def check(self, step: int, samples: Sequence[TrainSample]) -> None:
        """Warn of samples without the servers' experts, dumped or saved by a run that did not
        request them. Raises UserError for experts of another model."""
        if not self.from_servers:
            return
        num_without = 0
        for sample in samples:
            number = len(sample.routed_experts)
            num_without += number == 0
            if number and number != (sample.length - 1) * self.shape.per_token:
                raise UserError(
                    f"A response of group {sample.uid} has {number} routed experts for {sample.length - 1} tokens, but "
                    f"the model of actor_rollout_ref.model.path has {self.shape.per_token} per token; replay batches "
                    f"of this model, or set {ROUTER_REPLAY} to old or off."
                )
        if num_without:
            log.warning(
                "Step %d: %d of %d responses have no routed experts: for their tokens the trainer's routers choose.",
                step,
                num_without,
                len(samples),
            )
