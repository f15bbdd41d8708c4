"""Checks of this card for our needs: versions, ceilings, and the kernels, small, against float64.

A minute, most of it compiling. Every line that counts begins with >>.
"""

import os
import sys
import time
from dataclasses import replace
from importlib import metadata

import torch
import triton

T0 = time.monotonic()
FAILED = []


def shown(text: str) -> None:
    print(f">> {time.monotonic() - T0:5.1f} s  {text}", flush=True)


def check(name: str, work) -> None:
    begun = time.monotonic()
    try:
        answer = work()
    except Exception as error:  # the next check may still say something
        FAILED.append(name)
        text = str(error).strip().splitlines() or [""]
        return shown(f"FAILED {name}: {type(error).__name__}: {text[0][:200]}")
    shown(f"ok {name} ({time.monotonic() - begun:.1f} s){'' if answer is None else ': ' + answer}")


def versions() -> None:
    names = "torch triton transformers numpy megatron-core liger-kernel transformer-engine"
    installed = []
    for name in (*names.split(), "nvidia-nccl-cu13", "nvidia-cudnn-cu13"):
        try:
            installed.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            installed.append(f"{name} -")
    shown(f"python {sys.version.split()[0]}, {os.cpu_count()} cores; " + ", ".join(installed))


def imports() -> str:
    import megatron_dapo.job  # noqa: F401  all that a rank of the trainer imports

    # after it, which prepares megatron.core for this machine
    from megatron.core.extensions.transformer_engine import HAVE_TE  # isort: skip

    return f"Transformer Engine {'found' if HAVE_TE else 'absent'}"


def median_ms(work, rounds: int = 10) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        work()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[rounds // 2]


def copy_rate(device) -> str:
    x = torch.empty(2**30, dtype=torch.float32, device=device).normal_()
    y = torch.empty_like(x)
    return f"{2 * x.nbytes / median_ms(lambda: y.copy_(x)) / 1e9:.2f} TB/s, bytes read and written"


def product_rate(device) -> str:
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return f"{2 * n**3 / median_ms(lambda: a @ b) / 1e9:.0f} TFLOP/s in bfloat16 at {n}"


def float32_output(device) -> str:
    """The heads' need of torch: a product of bfloat16
    with float32 results (torch.mm with out_dtype)."""
    a, b = (torch.randn(256, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.mm(a, b, out_dtype=torch.float32)
    exact = a.double() @ b.double()
    return f"off by {((c.double() - exact).norm() / exact.norm()).item():.1e} of the norm"


def self_check(device, num_columns: int) -> str:
    from megatron_dapo.kernels.self_check import Check, largest_errors
    from tests.token_loss_oracle import EVERYTHING

    errors = largest_errors(Check(torch.bfloat16, num_columns, EVERYTHING, has_old_log_probs=True), device)
    bad = [f"{e.name} {e.error:.1e} > {e.bound:.0e}" for e in errors if not e.error <= e.bound]
    if bad:
        raise AssertionError("; ".join(bad))
    return ", ".join(f"{e.name} {e.error:.1e}" for e in errors)


def small_case(device):
    from tests import kernel_checks as checks
    from tests.full_kl_checks import check_full_kl

    case = checks.HeadCase.make(device, rows=700, hidden=512, vocab=8003, padding=5, chunk_size=256)
    for work in (
        checks.check_values,
        checks.check_composed_gradients,
        checks.check_fused_head,
        checks.check_fused_is_composed,
        checks.check_run_to_run,
        checks.check_batch_invariance,
        checks.check_no_host_sync,
        check_full_kl,
    ):
        check(f"small head: {work.__name__}", lambda work=work: work(case))
    losses = {
        "plain": replace(checks.LOSS, off_policy=None, rollout_is_threshold=None, use_kl_loss=False),
        "everything": checks.LOSS,
        **{kind: replace(checks.LOSS, policy_loss=kind) for kind in ("cispo", "sapo")},
    }
    for name, loss in losses.items():
        check(f"token loss: {name}", lambda loss=loss: checks.check_token_loss(case, loss))
    # of fewer words, so that some chances are far apart
    likely = checks.HeadCase.make(device, rows=4000, hidden=64, vocab=512, chunk_size=256)
    for kind in ("dppo_tv", "dppo_kl"):
        loss = replace(checks.MASKING, policy_loss=kind)
        check(f"token loss: {kind}", lambda loss=loss: checks.check_token_loss(likely, loss))


def main() -> int:
    versions()
    check("imports of a trainer's rank", imports)
    if not torch.cuda.is_available():
        shown(f"no GPU: torch {torch.__version__} sees none; triton {triton.__version__}")
        return 1 if FAILED else 77
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    shown(
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}, "
        f"NCCL {torch.cuda.nccl.version()}, cuDNN {torch.backends.cudnn.version()}"
    )
    check("copy", lambda: copy_rate(device))
    check("product", lambda: product_rate(device))
    check("product with float32 results", lambda: float32_output(device))
    for columns in (1003, 19008, 152064):
        check(f"self check, {columns} columns", lambda columns=columns: self_check(device, columns))
    small_case(device)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
