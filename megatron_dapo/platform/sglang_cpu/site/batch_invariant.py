"""SGLang plug-in: deterministic inference (--enable-deterministic-inference) on the CPU.

SGLang offers it for some attention backends of GPUs, with Triton kernels in place of torch's
products, and draws tokens by a hash in a CUDA kernel. Here torch_native becomes one of these
backends, and its results are made independent of the batch:

    computation                depends on                      cure
    -------------------------  ------------------------------  ---------------------------------
    a product of rows (sgemm)  the number of rows: small ones  blocks of 32 rows, the last padded
                               have other kernels; the CPU     with zeros: one shape only
                               sets the limit
    attention of a decode      the longest request             `batched_decode` rounds its length
    attention of a prompt      the cache, the cuts of chunks   SGLang then keeps no prefixes; the
                                                               servers' arguments cut no prompt
"""

import batched_decode
import torch

TARGET = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
CHOICES = "sglang.srt.server_args.add_deterministic_attention_backend_choices"

BLOCK = 32
"""Rows of one product. Intel's library takes other kernels below 4 to 16 rows, by the sizes and the
CPU."""

MULTIPLE = 64
"""Multiple of a decode's length. Below 400 products a matrix torch uses another loop."""

_MASK = 0xFFFFFFFF
_libraries = []  # a library's operators go with it


def mm(left, right):
    """Return left [M, K] @ right [K, N]; a row's bits do not depend on M."""
    num_rows = left.shape[0]
    if missing := -num_rows % BLOCK:
        left = torch.cat((left, left.new_zeros(missing, left.shape[1])))
    product = left.new_empty(left.shape[0], right.shape[1])
    for rows, products in zip(left.split(BLOCK), product.split(BLOCK), strict=True):
        torch.mm(rows, right, out=products)  # another operator, still torch's own
    return product[:num_rows]


def addmm(bias, left, right, *, beta=1, alpha=1):
    """Return beta * bias + alpha * left @ right; a row's bits do not depend on the number of
    rows."""
    return beta * bias + alpha * mm(left, right)


def enable_on_cpu(original, enable_bmm=True):
    """Enable batch-invariant operators for SGLang, which has none for a CPU."""
    batched_decode.length_multiple = MULTIPLE
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::mm", mm, "CPU")
    library.impl("aten::addmm", addmm, "CPU")
    _libraries.append(library)


def murmur_hash32(seeds, positions, columns):
    """Return MurmurHash3 (32 bits) of each seed [N], position [N] and column [M] as 8 + 4 + 4
    bytes: [N, M], uint32."""
    seeds, positions, columns = (numbers.to(torch.int64) for numbers in (seeds, positions, columns))
    rows = _mix(_mix(_mix(torch.zeros_like(seeds), seeds & _MASK), (seeds >> 32) & _MASK), positions & _MASK)
    hashed = _mix(rows[:, None], columns[None] & _MASK) ^ 16
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _MASK
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _mix(hashed, word):
    word = _rotated((word * 0xCC9E2D51) & _MASK, 15)
    hashed = _rotated(hashed ^ ((word * 0x1B873593) & _MASK), 13)
    return (hashed * 5 + 0xE6546B64) & _MASK


def _rotated(word, num_bits):
    return ((word << num_bits) & _MASK) | (word >> (32 - num_bits))


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside, stop_without

    run_inside(TARGET, enable_on_cpu)
    stop_without(CHOICES, enable_on_cpu)
    from sglang.srt.server_args import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _libraries.append(library)
