"""Log-probability and entropy of given tokens under a linear head, composable with any loss, never
holding the logits.

The backward pass computes each chunk of logits again: 8 N H V operations in all, against 6 of
`fused_dapo_head`. This is the way for a loss that the fused head cannot take, and the oracle that
it must equal.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.kernels.logits_chunk import accumulation_dtype, chunk_backend
from megatron_dapo.kernels.statistics import Merged, merge_over


def linear_logprob_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    want_entropy: bool = True,
    num_valid_columns: int | None = None,
    chunk_size: int = 1024,
    group: dist.ProcessGroup | None = None,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(targets) [N], and the entropy [N] if wanted, of softmax(hidden @ weight.T /
    temperature).

    Results are float32 (float64 for float64 inputs), at most 0. Gradients: this rank's share of d
    hidden (the caller sums it over `group`, as for any column-parallel layer) and the whole of d
    weight. Every rank of `group` must call it with the same N, zero included.

    Args:
        hidden_NH: [N, H], the same on all ranks of `group`.
        weight_VH: [V / ranks, H], this rank's rows of the vocabulary.
        targets_N: [N] int64, in the whole vocabulary.
        temperature: one number, or one per row [N].
        num_valid_columns: columns of the whole vocabulary; padding beyond it gets no probability.
        chunk_size: rows of logits held at once.
        use_triton: None: by device.
    """
    share = VocabShare.of(weight_VH, num_valid_columns, group)
    log_prob, entropy = _LinearLogProb.apply(
        hidden_NH,
        weight_VH,
        targets_N - share.first,
        inverse_temperature(temperature, targets_N, accumulation_dtype(weight_VH.dtype)),
        want_entropy,
        share.num_valid,
        chunk_size,
        group,
        use_triton,
    )
    return log_prob, entropy if want_entropy else None


class VocabShare:
    """This rank's rows of the vocabulary: index of the first, and how many of them exist (the rest
    is padding)."""

    def __init__(self, first: int, num_valid: int) -> None:
        self.first = first
        self.num_valid = num_valid

    @classmethod
    def of(cls, weight_VH: Tensor, num_valid_columns: int | None, group: dist.ProcessGroup | None) -> "VocabShare":
        rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
        columns = weight_VH.size(0)
        total = columns * size if num_valid_columns is None else num_valid_columns
        return cls(rank * columns, min(max(total - rank * columns, 0), columns))


def inverse_temperature(temperature: float | Tensor, like_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [N] in dtype, on the device of like_N, whether one number or one per row was given."""
    if isinstance(temperature, Tensor):
        return temperature.to(dtype).reciprocal()
    return torch.full(like_N.shape, 1.0 / temperature, dtype=dtype, device=like_N.device)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, local_targets, inv_temperature, want_entropy, num_valid, chunk_size, group, triton
    ):
        backend = chunk_backend(weight[:num_valid], chunk_size, min(chunk_size, hidden.size(0)), triton)
        stats = hidden.new_empty((hidden.size(0), 4), dtype=accumulation_dtype(hidden.dtype))
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            inputs = hidden[rows], inv_temperature[rows], local_targets[rows]
            stats[rows] = backend.statistics(*inputs, want_entropy)
        merged = merge_over(stats, group)
        ctx.save_for_backward(hidden, weight, local_targets, inv_temperature, *merged)
        ctx.settings = (num_valid, chunk_size, triton)
        ctx.set_materialize_grads(False)
        return merged.log_prob, merged.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, local_targets, inv_temperature, *merged = ctx.saved_tensors
        num_valid, chunk_size, triton = ctx.settings
        backend = chunk_backend(weight[:num_valid], chunk_size, min(chunk_size, hidden.size(0)), triton)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            backend.statistics(hidden[rows], inv_temperature[rows], local_targets[rows], False)
            backend.gradient(
                Merged(*(t[rows] for t in merged)),
                None if grad_log_prob is None else grad_log_prob[rows].contiguous(),
                None if grad_entropy is None else grad_entropy[rows].contiguous(),
            )
            grad_hidden[rows] = backend.grad_hidden()
            backend.add_grad_weight(grad_weight[:num_valid])
        return grad_hidden, grad_weight.to(weight.dtype), *(None,) * 7
