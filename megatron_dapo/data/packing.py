"""From a mini-batch to micro-batches: their samples under a hard token cap, and their tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.algorithms.rollout_correction import Corrected
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import round_up
from megatron_dapo.data.batching import CostModel, TrainSample, shard_over_data_parallel
from megatron_dapo.data.bins import Bins, balanced, halved, rectangles, usable_tokens
from megatron_dapo.data.tight_bins import tight
from megatron_dapo.data.token_arrays import VERSION, Dtype

ACTOR_CAP = "actor_rollout_ref.actor.max_tokens_per_microbatch"


def schedule(
    samples: Sequence[TrainSample],
    *,
    dp_size: int,
    max_tokens: int,
    pad_multiple: int = 1,
    segment_multiple: int = 1,
    packed: bool = True,
    num_microbatches_multiple: int = 1,
    cost: CostModel | None = None,
) -> list[Bins]:
    """Return the samples of each micro-batch of each rank: [dp_size][num_microbatches] lists.

    Every sample occurs exactly once. Every micro-batch holds at most max_tokens tokens, padding
    included. All ranks have the same number of micro-batches: the largest number needed by any
    rank, rounded up to a multiple of num_microbatches_multiple.

    Cost is balanced over ranks, then over the micro-batches of a rank, the costliest first. An
    empty list (a dummy micro-batch) occurs only on a rank with fewer samples than micro-batches.

    Deterministic: depends only on the samples' lengths and ids. Raises UserError for samples longer
    than the cap.
    """
    shards = shard_over_data_parallel(samples, dp_size, cost)
    return schedule_shards(
        shards,
        max_tokens=max_tokens,
        pad_multiple=pad_multiple,
        segment_multiple=segment_multiple,
        packed=packed,
        num_microbatches_multiple=num_microbatches_multiple,
        cost=cost,
    )


def schedule_shards(
    shards: Sequence[Sequence[TrainSample]],
    *,
    max_tokens: int,
    pad_multiple: int = 1,
    segment_multiple: int = 1,
    packed: bool = True,
    num_microbatches_multiple: int = 1,
    cost: CostModel | None = None,
    cap_key: str = ACTOR_CAP,
) -> list[Bins]:
    """Return the same as `schedule` for samples already assigned to ranks.

    cap_key: the config key of max_tokens.
    """
    _check_lengths([sample for shard in shards for sample in shard], max_tokens, pad_multiple, cap_key)
    cost = cost or CostModel()
    capacity = usable_tokens(max_tokens, pad_multiple)
    bins_of_rank = [
        tight(shard, capacity, segment_multiple) if packed else rectangles(shard, max_tokens, pad_multiple)
        for shard in shards
    ]
    num_bins = round_up(max(1, *map(len, bins_of_rank)), num_microbatches_multiple)

    def spread(shard: Sequence[TrainSample], bins: Bins) -> Bins:
        # In a rectangle, mixing lengths costs more padding than balance wins: there the bins stay
        # sorted by length.
        even = balanced(shard, num_bins, capacity, cost, segment_multiple) if packed else None
        return sorted(even or halved(bins, num_bins, cost), key=lambda bin_: -_cost(bin_, cost))

    return [spread(shard, bins) for shard, bins in zip(shards, bins_of_rank, strict=True)]


def _check_lengths(
    samples: Iterable[TrainSample], max_tokens: int, pad_multiple: int = 1, cap_key: str = ACTOR_CAP
) -> None:
    """Raise UserError if a sample, padded, does not fit into a micro-batch."""
    longest = max((sample.length for sample in samples), default=0)
    if round_up(longest, pad_multiple) > max_tokens:
        raise UserError(
            f"A sample of {longest} tokens does not fit into {cap_key}={max_tokens}: raise it to at least "
            f"{round_up(longest, pad_multiple)}, or lower data.max_prompt_length or data.max_response_length."
        )


def _cost(samples: Iterable[TrainSample], cost: CostModel) -> float:
    return sum(cost(sample.length) for sample in samples)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The tensors of one forward and backward pass; shape [1, T] packed, [B, S] not.

    Tensors per token are aligned to the predicting position: entry t belongs to token t + 1 of the
    same sequence, which is targets[t]. A sequence's last token and padding have target 0 and mask
    0.

    Packed segments may be padded at their right; the padding of T is one more segment, the last.
    Not packed, every row is a segment, padded at its right.
    """

    tokens: Tensor  # int64
    targets: Tensor  # int64
    loss_mask: Tensor  # float32
    advantages: Tensor  # float32
    rollout_log_probs: Tensor  # float32
    weight_versions: Tensor  # int32, of the weights that wrote the token
    replayed: Tensor  # [num_segments] float32: 1 for a replayed sample
    num_elsewhere: Tensor  # [num_segments] int64, see `TrainSample`
    stands: Tensor  # [num_segments] bool, the same
    cu_seqlens: Tensor | None  # [num_segments + 1] int32, covers all T; None if not packed
    max_seqlen: int
    num_segments: int
    widths: tuple[int, ...]  # of the segments, with their padding; stay on the host
    # positions with loss, ascending in Megatron's order (s * B + b); stays on the host
    counted_rows: np.ndarray
    sample_ids: tuple[int, ...]  # of the segments, in order; padding and dummies have none
    lengths: tuple[int, ...]  # of those samples
    old_log_probs: Tensor | None = None  # float32
    ref_log_probs: Tensor | None = None  # float32
    # for a KL over the whole vocabulary. ref_hidden: the reference's hidden states of this rank's
    # counted rows, [K, H]. ref_weight: the vocabulary's rows multiplied with them, one tensor for
    # all batches. full_kl: the KL per token of the policy before its update
    ref_hidden: Tensor | None = None
    ref_weight: Tensor | None = None
    full_kl: Tensor | None = None
    # factors on each token's policy loss, known after the old log-probs
    correction: Corrected | None = None
    # float32: by the critic before its update, and the returns for its learning
    values: Tensor | None = None
    returns: Tensor | None = None
    # replayed by this rank's routers, or first recorded (`RouterPass.experts`); stay in the host's
    # memory
    experts: Tensor | None = None

    @property
    def num_counted(self) -> int:
        """Return the number of tokens with loss, known without asking the device."""
        return len(self.counted_rows)

    @property
    def is_packed(self) -> bool:
        """Return whether the samples stand one after the other in one row."""
        return self.cu_seqlens is not None

    @property
    def segment_ids(self) -> Tensor:
        """Return the segment of each position, int64 of the shape of `tokens`."""
        segments = torch.arange(self.num_segments, device=self.tokens.device)
        if self.cu_seqlens is None:
            return segments[:, None].expand_as(self.tokens)
        # the size is given, so that nobody waits for the device to add it up
        return segments.repeat_interleave(self.cu_seqlens.diff(), output_size=self.tokens.numel()).view_as(self.tokens)

    @property
    def exp_mask(self) -> Tensor:
        """Return 1 at the positions of replayed samples, float32 of the shape of `tokens`."""
        return self.replayed[self.segment_ids]

    def is_token(self) -> np.ndarray:
        """Return a bool array of the shape of `tokens`, false in the padding."""
        flat = np.zeros(self.tokens.numel(), dtype=bool)
        for _, start, length in self._spans():
            flat[start : start + length] = True
        return flat.reshape(tuple(self.tokens.shape))

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return the same with all tensors on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in values.items()}
        return MicroBatch(**moved)

    def with_log_probs(self, *, old: Tensor | None = None, ref: Tensor | None = None) -> "MicroBatch":
        """Return the same with old or reference log-probs, shaped as `tokens`; None keeps them."""
        return replace(
            self,
            old_log_probs=self.old_log_probs if old is None else old,
            ref_log_probs=self.ref_log_probs if ref is None else ref,
        )

    def with_recorded_log_probs(self) -> "MicroBatch":
        """Return the same with the server's log-probs as the old ones of replayed samples.

        Their writer is not the policy that was scored. Without old log-probs nothing changes.
        """
        if self.old_log_probs is None:
            return self
        return self.with_log_probs(old=torch.where(self.exp_mask != 0, self.rollout_log_probs, self.old_log_probs))

    def by_sample(self, values: Tensor) -> dict[int, Tensor]:
        """Return values of the shape of `tokens` cut into {sample_id: [L]}."""
        flat = values.reshape(-1)
        return {i: flat[start : start + length] for i, start, length in self._spans()}

    def from_samples(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return {sample_id: [L]} in the shape of `tokens`, 0 in the padding.

        The inverse of by_sample. Samples of other micro-batches are ignored.
        """
        flat = torch.zeros(self.tokens.numel(), dtype=torch.float32, device=self.tokens.device)
        for i, start, length in self._spans():
            flat[start : start + length] = values[i]
        return flat.view_as(self.tokens)

    def _spans(self) -> list[tuple[int, int, int]]:
        """Return (sample_id, start in the flat tensors, length) of every sample."""
        starts = [0, *accumulate(self.widths)][: len(self.lengths)]
        return list(zip(self.sample_ids, starts, self.lengths, strict=True))


def collate(
    samples: Sequence[TrainSample], *, pad_multiple: int = 1, packed: bool = True, segment_multiple: int = 1
) -> MicroBatch:
    """Return the micro-batch of these samples, in order; a dummy without loss for no samples.

    T or S is padded to pad_multiple. Packed, every segment is padded to segment_multiple, a divisor
    of pad_multiple.
    """
    if packed:
        widths = [round_up(sample.length, segment_multiple) for sample in samples]
        padding = round_up(max(1, sum(widths)), pad_multiple) - sum(widths)
        widths += [padding] if padding else []
    else:
        width = round_up(max([1, *(sample.length for sample in samples)]), pad_multiple)
        widths = [width] * max(1, len(samples))
    shape = (1, -1) if packed else (len(widths), -1)
    tensors = {name: torch.from_numpy(row).view(shape) for name, row in _rows(samples, widths).items()}
    return MicroBatch(
        **tensors,
        replayed=torch.tensor([*(float(sample.exp_mask) for sample in samples), 0.0][: len(widths)]),
        num_elsewhere=torch.tensor([*(sample.num_elsewhere for sample in samples), 0][: len(widths)]),
        stands=torch.tensor([*(sample.stands for sample in samples), True][: len(widths)]),
        cu_seqlens=torch.tensor([0, *accumulate(widths)], dtype=torch.int32) if packed else None,
        max_seqlen=max(widths),
        num_segments=len(widths),
        widths=tuple(widths),
        # booleans take a third of the time of numbers
        counted_rows=np.flatnonzero(tensors["loss_mask"].numpy().T != 0),
        sample_ids=tuple(sample.sample_id for sample in samples),
        lengths=tuple(sample.length for sample in samples),
        correction=None,
    )


_DTYPES: dict[str, Dtype] = {
    "tokens": np.int64,
    "targets": np.int64,
    "loss_mask": np.float32,
    "advantages": np.float32,
    "rollout_log_probs": np.float32,
    "weight_versions": VERSION,
}
_PER_TOKEN = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")


def _rows(samples: Sequence[TrainSample], widths: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the segments one after the other, of the lengths in `widths`.

    Each holds one sample padded at its right; those beyond the samples hold only padding. Every
    place is written once: zeros to begin with would take a third of the time.
    """
    rows = {name: np.empty(sum(widths), dtype=dtype) for name, dtype in _DTYPES.items()}
    start = 0
    for sample, width in zip(samples, widths, strict=False):
        end = start + sample.length
        values = {name: getattr(sample, name) for name in _PER_TOKEN} | {"advantages": sample.advantage}
        for name, value in values.items():
            rows[name][start:end] = value
            rows[name][end : start + width] = 0
        rows["targets"][start : end - 1] = sample.tokens[1:]
        rows["targets"][end - 1 : start + width] = 0
        start += width
    for name in (*_PER_TOKEN, "advantages", "targets"):
        rows[name][start:] = 0
    return rows
