"""A chunk of logits at a time: the products and row operations that every head is made of, in torch
and in Triton.

Only the valid rows of the vocabulary enter a product, so padding columns never exist.
`chunk_backend` chooses by the device.
"""

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_dapo.common.sizes import round_up
from megatron_dapo.kernels.statistics import Merged, empty_share

# Rows of a product are padded to a multiple of this. Below four rows a CPU's matrix library takes
# another path, and the last bits of a row's log-prob would depend on the number of rows beside it.
_CPU_ROW_MULTIPLE = 8
_CPU_ROW_BLOCK = 32  # rows that stay in a core's cache from one operation to the next


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for every dtype but float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def runs_on_triton(tensor: Tensor) -> bool:
    """Return whether the Triton kernels take it: on CUDA, in any dtype but float64."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


class Divergence(NamedTuple):
    """The KL of each row to a reference."""

    reference: "ChunkBackend"
    """The argument of `ChunkBackend.divergence`."""
    kl: Tensor
    """[N], KL(p || q)."""
    grad: Tensor
    """[N], dL/dKL."""


class ChunkBackend(Protocol):
    """Logits of one chunk of rows, in buffers that the next chunk overwrites. V: this rank's valid
    columns."""

    def statistics(
        self, hidden_NH: Tensor, inv_temperature_N: Tensor, local_targets_N: Tensor, want_entropy: bool
    ) -> Tensor:
        """Compute the chunk's logits and return [N, 4] as in `statistics.py`; u is 0 unless
        want_entropy."""
        ...

    def divergence(self, reference: "ChunkBackend", merged: Merged, of_reference: Merged) -> Tensor:
        """Return [N]: this rank's share of sum_j p_j (log p_j - log q_j), q being the reference's.
        Both have the `statistics` of the same rows; the differences log p_j - log q_j take the
        place of the reference's logits."""
        ...

    def gradient(
        self,
        merged: Merged,
        grad_log_prob_N: Tensor | None,
        grad_entropy_N: Tensor | None,
        divergence: Divergence | None = None,
    ) -> None:
        """Turn the logits into the gradient of the logits. Once per `statistics`; divergence: after
        `divergence`."""
        ...

    def grad_hidden(self) -> Tensor:
        """Return [N, H] in the dtype of hidden: this rank's share, to be summed over the ranks."""
        ...

    def add_grad_weight(self, grad_VH: Tensor) -> None:
        """Add to [V, H], kept in the accumulation dtype."""
        ...


def chunk_backend(weight_VH: Tensor, chunk_size: int, num_used: int, use_triton: bool | None = None) -> ChunkBackend:
    """Return the backend for chunks of at most chunk_size rows; the largest one will use num_used
    of them. use_triton None: by device."""
    if runs_on_triton(weight_VH) if use_triton is None else use_triton:
        return _TritonChunk(weight_VH, chunk_size)
    return _TorchChunk(weight_VH, num_used)


class _TorchChunk:
    """Two buffers of [num_rows, V]: x - m, and e^(x - m), later overwritten by the gradient."""

    def __init__(self, weight_VH: Tensor, num_rows: int) -> None:
        self._dtype = accumulation_dtype(weight_VH.dtype)
        self._weight = weight_VH.to(self._dtype)
        num_rows = round_up(num_rows, _CPU_ROW_MULTIPLE)
        self._x = torch.empty(num_rows, weight_VH.size(0), dtype=self._dtype, device=weight_VH.device)
        self._e = torch.empty_like(self._x)

    def statistics(self, hidden, inv_temperature, local_targets, want_entropy):
        n = hidden.size(0)
        columns = self._weight.size(0)
        self._inv_temperature = inv_temperature
        self._targets = local_targets
        self._hidden_dtype = hidden.dtype
        # the temperature goes into the hidden states: H numbers per row, not V
        self._hidden = hidden.to(self._dtype) * inv_temperature.to(self._dtype)[:, None]
        if not columns:
            return empty_share(n, self._dtype, hidden.device)
        padding = round_up(n, _CPU_ROW_MULTIPLE) - n
        rows = torch.nn.functional.pad(self._hidden, (0, 0, 0, padding)) if padding else self._hidden
        torch.mm(rows, self._weight.t(), out=self._x[: n + padding])
        x = self._x[:n]
        is_mine, index = _own_targets(self._targets, columns)
        x_t = torch.where(is_mine, x.gather(1, index)[:, 0], float("-inf"))
        # with the rows of the padding: a lone row would be added up in another order than one of
        # several
        blocks = zip(*(t[: n + padding].split(_CPU_ROW_BLOCK) for t in (self._x, self._e)), strict=True)
        self._m, s, u = (
            torch.cat(parts)[:n] for parts in zip(*(_shift(a, b, want_entropy) for a, b in blocks), strict=True)
        )
        return torch.stack([self._m, s, u, x_t], dim=1)

    def divergence(self, reference, merged, of_reference):
        n = self._targets.size(0)
        columns = self._weight.size(0)
        if not columns:
            return merged.top.new_zeros(n)
        k = (self._m - merged.top) - merged.log_s
        gap = k - ((reference._m - of_reference.top) - of_reference.log_s)
        padding = round_up(n, _CPU_ROW_MULTIPLE) - n
        gap = torch.nn.functional.pad(gap, (0, padding))[:, None]
        chunk = (self._e, self._x, reference._x)
        blocks = zip(*(t[: n + padding].split(_CPU_ROW_BLOCK) for t in (*chunk, gap)), strict=True)
        parts = [torch.linalg.vecdot(e, torch.sub(x, y, out=y).add_(g)) for e, x, y, g in blocks]
        return torch.cat([*parts, gap[:0, 0]])[:n] * k.exp()

    def gradient(self, merged, grad_log_prob, grad_entropy, divergence=None):
        n = self._targets.size(0)
        columns = self._weight.size(0)
        self._d = self._e[:n]
        if not columns:
            return
        # with k = m - M - log S: log p_j = (x_j - m) + k, so d_j = e_j (c1 + c2 (x_j - m)) + g_lp
        # 1[j = t]
        k = (self._m - merged.top) - merged.log_s
        share = k.exp()
        c1 = torch.zeros_like(share) if grad_log_prob is None else -share * grad_log_prob
        c1 = c1 if grad_entropy is None else c1 - share * grad_entropy * (k + merged.entropy)
        factor = c1[:, None]
        if divergence is not None:
            to_kl = (share * divergence.grad)[:, None]
            difference = divergence.reference._x[:n]
            factor = torch.addcmul(factor - to_kl * divergence.kl[:, None], difference, to_kl, out=difference)
        if grad_entropy is not None:
            x = self._x[:n]
            factor = torch.addcmul(factor, x, (-share * grad_entropy)[:, None], out=x)
        self._d.mul_(factor)
        if grad_log_prob is not None:
            is_mine, index = _own_targets(self._targets, columns)
            self._d.scatter_add_(1, index, torch.where(is_mine, grad_log_prob, 0.0).to(self._dtype)[:, None])

    def grad_hidden(self):
        product = torch.mm(self._d, self._weight)
        return product.mul_(self._inv_temperature.to(self._dtype)[:, None]).to(self._hidden_dtype)

    def add_grad_weight(self, grad_VH):
        grad_VH.addmm_(self._d.t(), self._hidden)


class _TritonChunk:
    """One float32 buffer of logits [num_rows, V], and one of gradients in the weight's dtype.

    Every product of logits has num_rows rows. So cuBLAS always takes the same kernel, and a row's
    bits do not depend on its neighbors.
    """

    def __init__(self, weight_VH: Tensor, num_rows: int) -> None:
        from megatron_dapo.kernels.triton_ops import rows

        self._rows = rows
        self._weight = weight_VH
        self._num_rows = num_rows

    @functools.cached_property
    def _hidden_padded(self) -> Tensor:
        return self._weight.new_zeros(self._num_rows, self._weight.size(1))

    @functools.cached_property
    def _x(self) -> Tensor:
        return self._buffer(torch.float32)

    @functools.cached_property
    def _d_buffer(self) -> Tensor:
        return self._buffer(self._weight.dtype)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        """Return [num_rows, V], allocated when it is first used: not every pass needs every one."""
        columns = self._weight.size(0)
        # padded so that every row begins on a 16-byte boundary, for wide loads in Triton
        return self._weight.new_empty(self._num_rows, round_up(columns, 16), dtype=dtype)[:, :columns]

    def statistics(self, hidden, inv_temperature, local_targets, want_entropy):
        n = hidden.size(0)
        self._inv_temperature = inv_temperature
        self._targets = local_targets
        self._n = n
        if not self._weight.size(0):
            self._hidden = hidden
            return empty_share(n, torch.float32, hidden.device)
        self._hidden_padded[:n] = hidden
        self._hidden = self._hidden_padded[:n]
        _mm_float32(self._hidden_padded, self._weight.t(), out=self._x)
        return self._rows.row_statistics(self._x[:n], inv_temperature, local_targets, want_entropy=want_entropy)

    def divergence(self, reference, merged, of_reference):
        if not self._weight.size(0):
            return merged.top.new_zeros(self._n)
        x = self._x[: self._n]
        y = reference._x[: self._n]
        return self._rows.row_divergence(x, y, self._inv_temperature, merged, of_reference)

    def gradient(self, merged, grad_log_prob, grad_entropy, divergence=None):
        if not self._weight.size(0):
            self._d = self._weight.new_empty(self._n, 0)
            return
        self._d = self._d_buffer[: self._n]
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(merged.top)
        terms = None
        if divergence is not None:
            terms = self._rows.KLTerms(divergence.reference._x[: self._n], divergence.kl, divergence.grad)
        inputs = self._inv_temperature, self._targets, merged, grad_log_prob, grad_entropy
        self._rows.row_gradient(self._x[: self._n], *inputs, self._d, kl=terms)

    def grad_hidden(self):
        # in float32 first: cuBLAS may add up parts of a product of halves in half precision
        product = torch.empty(self._d.size(0), self._weight.size(1), dtype=torch.float32, device=self._d.device)
        _mm_float32(self._d, self._weight, out=product)
        return product.to(self._weight.dtype)

    def add_grad_weight(self, grad_VH):
        if self._d.dtype == torch.float32:
            grad_VH.addmm_(self._d.t(), self._hidden)
        else:
            torch.addmm(grad_VH, self._d.t(), self._hidden, out_dtype=torch.float32, out=grad_VH)


def _own_targets(local_targets_N: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return (whether this rank has the target's column [N], its index or another valid one [N,
    1])."""
    is_mine = (local_targets_N >= 0) & (local_targets_N < num_columns)
    return is_mine, local_targets_N.clamp(0, num_columns - 1)[:, None]


def _shift(x: Tensor, e: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return m, s, u of each row; x becomes x - m, and e its exponential."""
    m = x.amax(1)
    torch.exp(x.sub_(m[:, None]), out=e)
    return m, e.sum(1), torch.linalg.vecdot(x, e) if want_entropy else torch.zeros_like(m)


def _mm_float32(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute out = a @ b with float32 results: a product of halves is never rounded to half
    precision."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
