"""Runs the Triton kernels of every test in this folder in Triton's interpreter, on CPU tensors.

Triton chooses between compiling and interpreting when `triton.jit` decorates a function, by an
environment variable. That would decide for the whole process, but other tests compile the same
kernels. Here, during each test of this folder, launched kernels and the functions called inside
them go to the interpreter. Kernels are launched as usual, through their wrappers or as
`kernel[grid](...)`.

Invisible to the interpreter: memory accesses out of bounds, races,
rounding of `tl.dot` on tensor cores.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.compiler.code_generator  # noqa: F401  at import it notes tl.minimum: before the patch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.jit import JITFunction

_BODIES = {}  # per function: its body, rewritten so that NumPy can run it


def _body(kernel):
    if kernel.fn not in _BODIES:
        _BODIES[kernel.fn] = triton_interpreter.FunctionRewriter(kernel.fn).rewrite_ast()
    return _BODIES[kernel.fn]


def _launch(kernel, *args, grid, warmup=False, **kwargs):
    """`JITFunction.run`."""
    assert not warmup, "the interpreter compiles nothing"
    triton_interpreter.GridExecutor(_body(kernel), kernel.arg_names, grid)(*args, **kwargs)


def _call(function, *args, **kwargs):
    """`JITFunction.__call__`, inside a kernel."""
    return _body(function)(*args, **kwargs)


def _widened(handle):
    """bfloat16 is held as its 16 bits; NumPy's matmul would multiply those as integers."""
    if handle.dtype.scalar == tl.bfloat16:
        return triton_interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    return handle


def _mm_wide(a, b, out_dtype, *, out):
    return out.copy_(a.to(out_dtype) @ b.to(out_dtype))


def _addmm_wide(c, a, b, out_dtype, *, beta=1, alpha=1, out):
    return out.copy_(beta * c + alpha * (a.to(out_dtype) @ b.to(out_dtype)))


# products of halves with float32 results, in torch for CUDA only
_PRODUCTS = torch.library.Library("aten", "IMPL")
_PRODUCTS.impl("mm.dtype_out", _mm_wide, "CPU")
_PRODUCTS.impl("addmm.dtype_out", _addmm_wide, "CPU")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    builder = triton_interpreter.InterpreterBuilder
    dot = builder.create_dot
    monkeypatch.setattr(JITFunction, "run", _launch)
    monkeypatch.setattr(JITFunction, "__call__", _call)
    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, _widened(a), _widened(b), *rest))
    # the executor patches the kernel's own view; tl.sum and its like see tl.core
    patches = triton_interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    with np.errstate(invalid="ignore"):  # -inf times 0 is computed and not selected
        yield
    patches.restore()
