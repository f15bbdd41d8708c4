"""Compiles the Triton kernels as production launches them, for GPUs that need not be there, and
reads the machine code.

The wrappers run as they are, on tensors of production shapes without memory (torch's meta device).
A launch compiles the kernel instead, with Triton's own compiler and assembler, and takes its
machine code apart.

    python -m tests.ahead_of_time > tests/compile/ahead_of_time.json     # writes the table that the tests compare with
"""

import contextlib
import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch
from megatron_dapo.kernels import tuning
from megatron_dapo.kernels.statistics import Merged
from megatron_dapo.kernels.triton_ops.loss_kernel import token_loss
from megatron_dapo.kernels.triton_ops.rows import KLTerms, row_divergence, row_gradient, row_statistics
from tests.token_loss_oracle import BYPASS, EVERYTHING, KL, SAPO, TV

TABLE = Path(__file__).with_name("compile") / "ahead_of_time.json"
# bytes that one program can have
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
# model: hidden size, one rank's share of the vocabulary;
# GPT-2's stands for vocabularies of an odd number
SHAPES = {"0.5B": (896, 151936), "7B": (3584, 152064), "32B, TP 8": (5120, 19008), "GPT-2": (768, 50257)}
CHUNK = 4096
# telltale instructions, as machine code spells them
INSTRUCTIONS = {
    "wide_loads": r"LDG\.E\S*\.128",
    "wide_stores": r"STG\.E\S*\.128",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel: registers per thread, bytes of them spilled to memory (stores and loads), bytes
    of shared memory per program. And the number of instructions of each kind in the machine
    code."""

    registers: int
    spilled: int
    shared: int
    wide_loads: int
    wide_stores: int

    def as_row(self) -> dict[str, int]:
        """Without absent instructions."""
        return {key: value for key, value in asdict(self).items() if value or key not in INSTRUCTIONS}


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _row_arguments(shape: str, dtype: torch.dtype, n: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    columns = SHAPES[shape][1]  # rows lie as far apart as in the heads' buffers
    logits = _meta(n, -(-columns // 16) * 16, dtype=dtype)[:, :columns]
    return logits, _meta(n), _meta(n, dtype=torch.int64)


def _statistics(shape: str, dtype: torch.dtype, want_entropy: bool) -> Callable[[], object]:
    return lambda: row_statistics(*_row_arguments(shape, dtype), want_entropy=want_entropy)


def _gradient(shape: str, dtype: torch.dtype, out_dtype: torch.dtype, with_entropy: bool) -> Callable[[], object]:
    def launch():
        logits, row, targets = _row_arguments(shape, dtype)
        out = _row_arguments(shape, out_dtype)[0]
        row_gradient(logits, row, targets, Merged(row, row, row, row), row, row if with_entropy else None, out)

    return launch


def _with_kl(shape: str) -> Callable[[], object]:
    """Both kernels of a loss that has the KL over the whole vocabulary."""

    def launch():
        logits, row, targets = _row_arguments(shape, _FP32)
        other, out, merged = (
            _row_arguments(shape, _FP32)[0],
            _row_arguments(shape, _BF16)[0],
            Merged(row, row, row, row),
        )
        kl = KLTerms(other, row_divergence(logits, other, row, merged, merged), row)
        row_gradient(logits, row, targets, merged, row, row, out, kl=kl)

    return launch


def _loss(config: LossConfig, *fields: str) -> Callable[[], object]:
    def launch():
        row = _meta(CHUNK)
        masks = {name: _meta(CHUNK, dtype=torch.bool) for name in fields if name in _MASKS}
        tokens = TokenBatch(row, _meta(dtype=torch.int64), row, **dict.fromkeys(fields, row) | masks)
        token_loss(row, row if config.report_entropy else None, tokens, config, row if config.use_full_kl else None)

    return launch


_FP32, _BF16 = torch.float32, torch.bfloat16
_MASKS = ("is_current", "is_stale", "exp_mask")
_ALL_FIELDS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "is_current", "exp_mask")
CASES: dict[str, Callable[[], object]] = {
    "row statistics, 32B TP 8, fp32": _statistics("32B, TP 8", _FP32, True),
    "row statistics, 32B TP 8, fp32, no entropy": _statistics("32B, TP 8", _FP32, False),
    "row statistics, 7B, fp32": _statistics("7B", _FP32, True),
    "row statistics, 7B, bf16": _statistics("7B", _BF16, True),
    "row statistics, GPT-2, fp32": _statistics("GPT-2", _FP32, True),
    "row gradient, GPT-2, fp32 to bf16": _gradient("GPT-2", _FP32, _BF16, True),
    "row gradient, 32B TP 8, fp32 to bf16": _gradient("32B, TP 8", _FP32, _BF16, True),
    "row gradient, 32B TP 8, fp32 to bf16, no entropy": _gradient("32B, TP 8", _FP32, _BF16, False),
    "row gradient, 7B, fp32 to bf16": _gradient("7B", _FP32, _BF16, True),
    "row gradient, 7B, bf16 to bf16": _gradient("7B", _BF16, _BF16, True),
    "full KL, 32B TP 8": _with_kl("32B, TP 8"),
    "full KL, 7B": _with_kl("7B"),
    "token loss": _loss(LossConfig(report_entropy=True), "old_log_probs", "rollout_log_probs"),
    "token loss, everything on": _loss(EVERYTHING, *_ALL_FIELDS),
    "token loss, everything on, CISPO": _loss(replace(EVERYTHING, policy_loss="cispo"), *_ALL_FIELDS),
    "token loss, everything on, SAPO": _loss(SAPO, *_ALL_FIELDS),
    "token loss, everything on, DPPO by total variation": _loss(TV, *_ALL_FIELDS),
    "token loss, everything on, DPPO by KL": _loss(KL, *_ALL_FIELDS),
    "token loss, weighed before, of older weights too": _loss(BYPASS, *_ALL_FIELDS, "is_stale", "importance"),
    "token loss, full KL": _loss(
        LossConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="full"), "rollout_log_probs"
    ),
}
# the kernels are laid out for sm_90; elsewhere one of each kind says whether they compile
_ELSEWHERE = (
    "row statistics, 32B TP 8, fp32",
    "row gradient, 32B TP 8, fp32 to bf16",
    "full KL, 32B TP 8",
    "token loss, everything on",
)
COMPILED = [("sm_90", name) for name in CASES] + [(sm, name) for sm in ("sm_80", "sm_100") for name in _ELSEWHERE]


class _AbsentGpu:
    """Stands in for Triton's driver. The device is numbered like its architecture: Triton keeps
    kernels per device."""

    def __init__(self, architecture: str) -> None:
        self._number = int(architecture.removeprefix("sm_"))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._number, 32)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _compiling_for(architecture: str) -> Iterator[list]:
    """Launches compile instead; pairs (compiled kernel, output
    of the assembler) go into the list."""
    compiled, run = [], JITFunction.run

    def compile_instead(self, *args, grid, warmup=False, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled.append((run(self, *args, grid=grid, warmup=True, **kwargs), log))

    with (
        tempfile.TemporaryDirectory(prefix="triton-") as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1"),
        mock.patch.object(driver, "_active", _AbsentGpu(architecture)),
        mock.patch.object(tuning, "architecture", lambda device: architecture),
        mock.patch.object(JITFunction, "run", compile_instead),
    ):
        yield compiled


def compile_case(architecture: str, name: str) -> dict[str, Compiled]:
    """The kernels that this case launches, by name."""
    with _compiling_for(architecture) as kernels:
        CASES[name]()
    assert kernels, f"{name} launches nothing"
    return {kernel.metadata.name: _taken_apart(kernel, log.getvalue()) for kernel, log in kernels}


# Triton compiles a kernel once per process: two shapes may share one
_KNOWN: dict[str, Compiled] = {}


def _taken_apart(kernel, log: str) -> Compiled:
    if kernel.hash in _KNOWN:
        return _KNOWN[kernel.hash]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        machine_code = _output(triton.knobs.nvidia.nvdisasm.path, "-c", cubin.name)
    _KNOWN[kernel.hash] = Compiled(
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        shared=kernel.metadata.shared,
        **{key: len(re.findall(rf"\s{pattern}\b", machine_code)) for key, pattern in INSTRUCTIONS.items()},
    )
    return _KNOWN[kernel.hash]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tools() -> dict[str, str]:
    """The versions behind the register counts."""
    names = ("ptxas", "ptxas_blackwell")
    return {"triton": triton.__version__} | {name: getattr(triton.knobs.nvidia, name).version for name in names}


def main() -> None:
    lines = [f'  "tools": {json.dumps(tools())}']
    for architecture, name in COMPILED:
        for kernel, compiled in compile_case(architecture, name).items():
            lines.append(f"  {json.dumps(key(architecture, name, kernel))}: {json.dumps(compiled.as_row())}")
    print("{\n" + ",\n".join(lines) + "\n}")


def key(architecture: str, name: str, kernel: str) -> str:
    return f"{architecture}: {name}: {kernel}"


if __name__ == "__main__":
    main()
