"""The way from token losses to one number: each mode has a weight per token and a count."""

from collections.abc import Callable

import torch
from torch import Tensor

# mode -> (weight of a counted token from its sequence's length and the maximum length, whether
# sequences are counted)
AGGREGATIONS: dict[str, tuple[Callable[[Tensor, int], Tensor], bool]] = {
    "token-mean": (lambda length, longest: torch.ones_like(length), False),
    "seq-mean-token-sum": (lambda length, longest: torch.ones_like(length), True),
    "seq-mean-token-mean": (lambda length, longest: 1.0 / length, True),
    "seq-mean-token-sum-norm": (lambda length, longest: torch.full_like(length, 1.0 / longest), True),
}


def token_weights(
    mode: str,
    loss_mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    max_response_length: int,
    dtype: torch.dtype = torch.float32,
    num_elsewhere: Tensor | None = None,
    stands: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights and count; sum(weights * loss) / sum(counts) is the loss of `mode`.

    Every cut of a batch gives the same loss. loss_mask: any shape, non-zero at counted tokens.
    segment_ids: same shape, the sequence of each token, in [0, num_segments). A sequence must lie
    in one piece of the cut; its length is the number of its counted tokens.

    Rows of one trajectory count as one sequence, also in different pieces of the cut, if they know
    of each other, by tensors [num_segments]. num_elsewhere: counted tokens in the other rows.
    stands: whether it is the trajectory's in the count, its first one with counted tokens.

    Weights have the same shape, and are exactly 0 at uncounted tokens. The count (int64 scalar) is
    of counted tokens, or of sequences with at least one. A sequence without counted tokens counts
    for nothing: no phantom token.
    """
    weight_of, counts_sequences = AGGREGATIONS[mode]
    counted = loss_mask != 0
    lengths = torch.zeros(num_segments, dtype=torch.int64, device=loss_mask.device)
    lengths.scatter_add_(0, segment_ids.reshape(-1).long(), counted.reshape(-1).long())
    whole = lengths if num_elsewhere is None else lengths + num_elsewhere
    length = whole.to(dtype)[segment_ids.long()]
    weights = torch.where(counted, weight_of(length.clamp(min=1), max_response_length), 0)
    if not counts_sequences:
        return weights, lengths.sum()
    is_sequence = lengths > 0
    return weights, (is_sequence if stands is None else is_sequence & stands).sum()
