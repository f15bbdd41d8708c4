"""From the conversations on rank 0 to every rank's own micro-batches, an optimizer step at a
time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_dapo.common.garbage import collection_paused
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import TrainSample
from megatron_dapo.data.bins import Bins
from megatron_dapo.data.conversations import ConversationSet
from megatron_dapo.data.flat_pickle import flat_pickle, from_flat_pickle
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.data.prompt_cursor import PromptCursor
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.cutting import Cutter

_HELD_OUT_AT_ONCE = 64  # micro-batches on the device


@dataclass(frozen=True)
class ConversationDraws:
    """The order of drawn conversations, kept in checkpoints; on rank 0.

    `RunCheckpoints` treats it as the rollout: the run's source of samples.
    """

    conversations: ConversationSet
    cursor: PromptCursor

    @classmethod
    def of(cls, conversations: ConversationSet, config: Config) -> "ConversationDraws":
        """Begin with the first draw."""
        data = config.data
        size = len(conversations.samples)
        return cls(conversations, PromptCursor(size, data.seed, data.shuffle, conversations.content))

    def next(self, count: int) -> list[TrainSample]:
        """Return the next conversations, every one once per epoch, numbered by their places in the
        batch."""
        drawn = [self.conversations.samples[number] for number in self.cursor.next(count)]
        return [replace(sample, sample_id=place) for place, sample in enumerate(drawn)]

    def halt(self) -> None:
        """Do nothing: no request is under way."""

    def state_dict(self) -> dict[str, Any]:
        return {"conversations": self.cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved order. Raises UserError if it is of other conversations."""
        self.cursor.load_state_dict(state["conversations"])


class ConversationDistributor:
    """Collective over all ranks: rank 0 brings conversations, every rank leaves with its
    micro-batches."""

    def __init__(self, config: Config, layout: ParallelLayout, spec: ModelSpec) -> None:
        self._layout = layout
        self._cutter = Cutter(config, layout, spec)

    @collection_paused()
    def __call__(self, samples: Sequence[TrainSample] | None) -> list[MicroBatch]:
        """Return this rank's part of a mini-batch. samples: all of it on rank 0, None on other
        ranks."""
        return self._cutter.collated(self._own_bins(samples))

    def held_out(self, samples: Sequence[TrainSample] | None) -> "HeldOut":
        """Return this rank's part of held-out conversations, which stays on the host."""
        return HeldOut(self._own_bins(samples), self._cutter)

    def _own_bins(self, samples: Sequence[TrainSample] | None) -> Bins:
        outgoing = self._layout.agreement.each("cutting a batch of conversations", self._parts, samples)
        return from_flat_pickle(self._layout.hand_out(outgoing))

    def _parts(self, samples: Sequence[TrainSample] | None) -> list[np.ndarray] | None:
        """Return on rank 0, which has the samples, the part of each data-parallel rank."""
        return None if samples is None else [flat_pickle(bins) for bins in self._cutter.schedule(samples)]


@dataclass(frozen=True)
class HeldOut:
    """This rank's part of the held-out conversations."""

    bins: Bins
    cutter: Cutter

    def batches(self) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches, some at a time, equally many on every rank."""
        at_once = _HELD_OUT_AT_ONCE * self.cutter.num_microbatches_multiple
        for start in range(0, len(self.bins), at_once):
            yield self.cutter.collated(self.bins[start : start + at_once])
