"""The KL from one linear head to another over the whole vocabulary, composable with any loss, never
holding the logits.

The backward pass computes each chunk's logits again, as in `linear_logprob.py`.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.kernels.linear_logprob import VocabShare, inverse_temperature
from megatron_dapo.kernels.logits_chunk import ChunkBackend, Divergence, accumulation_dtype, chunk_backend
from megatron_dapo.kernels.statistics import Merged, merge_over, sum_over


def linear_full_kl(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ref_hidden_NH: Tensor,
    ref_weight_VH: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    num_valid_columns: int | None = None,
    chunk_size: int = 1024,
    group: dist.ProcessGroup | None = None,
    use_triton: bool | None = None,
) -> Tensor:
    """Return sum_v p(v) (log p(v) - log q(v)) [N], p and q the softmax of each head's hidden @
    weight.T / temperature.

    Arguments and gradients are those of `linear_logprob_entropy`. The reference's hidden size may
    differ; it gets no gradient. Every rank of `group` must call it with the same N.
    """
    share = VocabShare.of(weight_VH, num_valid_columns, group)
    inv_temperature = inverse_temperature(temperature, hidden_NH[:, 0], accumulation_dtype(weight_VH.dtype))
    settings = (share.num_valid, chunk_size, group, use_triton)
    return _LinearFullKL.apply(hidden_NH, weight_VH, ref_hidden_NH, ref_weight_VH, inv_temperature, settings)


class _LinearFullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, inv_temperature, settings):
        num_valid, chunk_size, group, triton = settings
        pair = _pair(hidden, weight, ref_weight, settings)
        kl = hidden.new_zeros(hidden.size(0), dtype=accumulation_dtype(hidden.dtype))
        of_both: list[tuple[Merged, Merged]] = []
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            stats = _statistics(pair, hidden[rows], ref_hidden[rows], inv_temperature[rows])
            of_both.append((merge_over(stats[0], group), merge_over(stats[1], group)))
            kl[rows] = pair[0].divergence(pair[1], *of_both[-1])
        kl = sum_over(kl, group)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, inv_temperature, kl)
        ctx.settings = settings
        ctx.of_both = of_both
        return kl.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_kl):
        hidden, weight, ref_hidden, ref_weight, inv_temperature, kl = ctx.saved_tensors
        num_valid, chunk_size, _, _ = ctx.settings
        pair = _pair(hidden, weight, ref_weight, ctx.settings)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        starts = range(0, hidden.size(0), chunk_size)
        for start, of_both in zip(starts, ctx.of_both, strict=True):
            rows = slice(start, start + chunk_size)
            _statistics(pair, hidden[rows], ref_hidden[rows], inv_temperature[rows])
            pair[0].divergence(pair[1], *of_both)
            pair[0].gradient(of_both[0], None, None, Divergence(pair[1], kl[rows], grad_kl[rows].contiguous()))
            grad_hidden[rows] = pair[0].grad_hidden()
            pair[0].add_grad_weight(grad_weight[:num_valid])
        return grad_hidden, grad_weight.to(weight.dtype), *(None,) * 4


def _pair(hidden: Tensor, weight: Tensor, ref_weight: Tensor, settings: tuple) -> tuple[ChunkBackend, ChunkBackend]:
    num_valid, chunk_size, _, triton = settings
    num_used = min(chunk_size, hidden.size(0))
    return (
        chunk_backend(weight[:num_valid], chunk_size, num_used, triton),
        chunk_backend(ref_weight[:num_valid], chunk_size, num_used, triton),
    )


def _statistics(
    pair: tuple[ChunkBackend, ChunkBackend], hidden: Tensor, ref_hidden: Tensor, inv_temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return both heads' statistics of the same rows, without targets."""
    nobody = torch.full(inv_temperature.shape, -1, dtype=torch.int64, device=hidden.device)
    return (
        pair[0].statistics(hidden, inv_temperature, nobody, False),
        pair[1].statistics(ref_hidden, inv_temperature, nobody, False),
    )
