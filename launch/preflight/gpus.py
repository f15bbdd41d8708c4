"""The GPUs of a node: the number that the config needs, and their health according to the driver's
library (NVML)."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.preflight.machine import REPOSITORY, Result
from megatron_dapo.checks.gpu_checks import machine_here, shared_gpu_faults
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.sizes import format_bytes
from megatron_dapo.config.derived import (
    gpus_per_server_node,
    servers_per_node,
    shares_gpus,
    starts_reward_model,
    starts_servers,
)
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.config.schema.config import Config
from megatron_dapo.platform.transformer_engine import EngineHere

NVML_PACKAGE = "nvidia-ml-py"
# the first with CUDA 13; older ones need NVIDIA's compatibility package beside them
CUDA_13_DRIVER = 580
_COMPILE_S = 60.0
_PROBE_S = 90.0  # the other nodes wait for the checks of this one
_FREE_SHARE = 0.9  # a driver and a desktop keep some for themselves


def needed(config: Config, role: str, has_reward_model: bool = False) -> int:
    """Return the number of GPUs for a node's role: trainer, server (with servers of its own), or
    both.

    has_reward_model: whether a server node serves it too; for the role `both` the config decides.
    """
    count = config.trainer.n_procs_per_node if role != "server" else 0
    if role == "server" or (role == "both" and starts_servers(config) and not shares_gpus(config)):
        count += servers_per_node(config) * gpus_per_server_node(config)
    if has_reward_model or (role == "both" and starts_reward_model(config)):
        count += config.reward.model.tensor_model_parallel_size
    return count


def are_expected() -> bool:
    """Return whether this is a run on GPUs: torch can use them, and the machine or the scheduler
    says that there are some."""
    import torch

    if torch.version.cuda is None:
        return False
    granted = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("CUDA_VISIBLE_DEVICES")
    return bool(granted and granted != "0") or nvidia_driver.is_loaded()


def check(config: Config, role: str, has_reward_model: bool = False) -> Result:
    import torch

    if torch.version.cuda is None and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
        return Result(
            f"torch {torch.__version__}",
            "Slurm gives it GPUs, but its torch is built for CPUs only; run make setup PLATFORM=cuda in this folder.",
        )
    if not are_expected():
        return Result("none expected: torch runs on the CPU here")
    count = needed(config, role, has_reward_model)
    there = torch.cuda.device_count()
    if there < count:
        return Result(
            f"{there} of {count}",
            f"offers {there} GPUs, the config needs {count} on a {role} node; ask the scheduler for {count} per node, "
            "take the node out if it has lost some (`nvidia-smi`), or change trainer.n_procs_per_node or the servers.",
        )
    try:
        import pynvml
    except ImportError:
        return Result(f"{there}, {count} used; health not looked at: {NVML_PACKAGE} is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Result("no driver", f"the GPU driver does not answer ({error}); take the node out of the job.")
    from megatron_dapo.servers.server_command import visible_gpus

    faults = [fault for gpu in visible_gpus()[:count] for fault in _gpu_faults(pynvml, gpu)]
    name = pynvml.nvmlDeviceGetName(_handle(pynvml, visible_gpus()[0])) if not faults else "GPU"
    if faults:
        return Result(
            f"{len(faults)} faults", f"{'; '.join(faults)}; take the node out of the job, or cure that first."
        )
    driver = pynvml.nvmlSystemGetDriverVersion()
    engine = probe(count, driver)
    if isinstance(engine, str):
        return Result(f"unusable, driver {driver}", engine)
    summary = f"{there} x {name}, {count} used, driver {driver}, healthy; {engine}"
    return Result(summary, engine_fault(config, engine) if role != "server" else None)


def sharing(config: Config) -> Result:
    """Check the GPUs that trainer and servers of this node share, and the memory beside them."""
    from megatron_dapo.servers.server_command import visible_gpus

    here = machine_here(visible_gpus()[: config.trainer.n_procs_per_node])
    faults = list(shared_gpu_faults(config, here))
    summary = f"{len(here.gpus)} seen, {format_bytes(here.available, digits=0)} of memory available"
    return Result(summary, "; ".join(fault.rstrip(".") for fault in faults) + "." if faults else None)


def engine_fault(config: Config, engine: EngineHere) -> str | None:
    """Return the fault of Transformer Engine on a training node. If it is not installed, a config
    that needs it was refused before."""
    fault = engine.fault()
    if fault is None or config.actor_rollout_ref.actor.megatron.use_transformer_engine == "off":
        return None
    return f"{fault[:-1]}, or set {MEGATRON}.use_transformer_engine to off."


def probe(count: int, driver: str, timeout_s: float = _PROBE_S) -> EngineHere | str:
    """Return this node's Transformer Engine, or why torch cannot compute on the first `count` GPUs,
    with the cure. The driver's library calls GPUs healthy even if the driver is too old for torch's
    CUDA."""
    command = [sys.executable, "-m", "launch.preflight.gpu_probe", str(count)]
    cure = "look at `nvidia-smi` and `dmesg`, or take the node out of the job."
    number = driver.partition(".")[0]
    if number.isdigit() and int(number) < CUDA_13_DRIVER:
        cure = f"update the driver to {CUDA_13_DRIVER} or newer, which CUDA 13 needs, or take the node out of the job."
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"does not compute on its GPUs within {timeout_s:g} s (driver {driver}); {cure}"
    if done.returncode == 0:
        return EngineHere(**json.loads(done.stdout.splitlines()[-1]))
    said = [*done.stdout.split("\n"), *reversed(done.stderr.strip().splitlines())]
    words = next((line for line in said if line.strip()), f"exit code {done.returncode}")
    return f"cannot compute on its GPUs with driver {driver} ({words}); {cure}"


def compiler(uses_gpus: bool) -> Result:
    """Return whether a C program with Python's headers compiles here. Triton compiles one at its
    first kernel on a machine. If that fails, the fused log-prob head switches itself off, and the
    servers do not start."""
    if not uses_gpus:
        return Result("none needed: torch runs on the CPU here")
    # Triton's choice
    command = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    needs = "Triton's kernels need a C compiler and Python's headers"
    if command is None:
        return Result("none", f"has no C compiler: {needs}; install gcc, or set CC.")
    headers = Path(sysconfig.get_paths(scheme=_scheme())["include"])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\n")
        flags = ["-shared", "-fPIC", f"-I{headers}", "-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run([command, str(source), *flags], capture_output=True, text=True, timeout=_COMPILE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Result("fails", f"cannot run {command} ({error}): {needs}; install gcc, or set CC.")
    if done.returncode == 0:
        return Result(command)
    if not (headers / "Python.h").is_file():
        package = f"python{sysconfig.get_python_version()}-dev"
        return Result("no headers", f"has no {headers}/Python.h: {needs}; install {package} (or -devel).")
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Result("fails", f"{command} does not compile ({last}): {needs}; mend it, or set CC to another.")


_CUDA_PROBE = "#include <concepts>\n#include <cuda_runtime.h>\n__global__ void probe() {}\n"


def cuda_compiler() -> Result:
    """Return whether a CUDA program compiles and links here with SGLang's nvcc. A server on GPUs
    compiles some of its kernels at its start, and ends if that fails."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc_on_path = None if home else shutil.which("nvcc")
    nvcc = Path(nvcc_on_path or Path(home or "/usr/local/cuda", "bin", "nvcc"))
    needs = "SGLang compiles kernels with the CUDA toolkit when a server starts"
    cure = "install CUDA 13 there, load its module before sbatch (or set CUDA_HOME), or use a container that has it."
    if not nvcc.is_file():
        return Result("none", f"has no {nvcc}: {needs}; {cure}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text(_CUDA_PROBE)
        flags = ["-std=c++20", "-Xcompiler", "-fPIC", "-shared", "-o", str(source.with_suffix(".so"))]
        libraries = [f"-L{nvcc.parent.parent}/lib64", "-lcudart"]
        try:
            command = [str(nvcc), str(source), *flags, *libraries]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Result("fails", f"cannot run {nvcc} ({error}): {needs}; {cure}")
    if done.returncode == 0:
        return Result(str(nvcc))
    lines = [*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines()]
    # the linker says the latter
    words = (line for line in lines if "error" in line or "cannot find" in line)
    why = next(words, f"exit code {done.returncode}")
    return Result(
        "fails", f"{nvcc} does not compile C++20 ({why}): {needs}; mend it (g++ 10 or newer, its libcudart), or {cure}"
    )


def _scheme() -> str:
    """Return the name of the installation scheme with Python's headers in its folder.

    Debian's own Python names a scheme with an empty folder of headers; Triton does not use that
    scheme either.
    """
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def _handle(nvml: Any, gpu: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID(gpu)


def _gpu_faults(nvml: Any, gpu: str) -> list[str]:
    try:
        return [f"GPU {gpu} {fault}" for fault in faults_of(nvml, _handle(nvml, gpu))]
    except nvml.NVMLError as error:  # "GPU is lost", "Unknown Error": it fell off the bus
        return [f"GPU {gpu} does not answer ({error})"]


def faults_of(nvml: Any, handle: Any) -> Iterator[str]:
    """Yield the faults of one GPU. Queries that this GPU does not support are no fault."""

    def ask(question: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, question)(handle, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
            return None

    errors = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    if errors:
        yield f"has {errors} uncorrected memory errors since the driver was loaded (reset it)"
    rows = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    if rows is not None and rows[3]:
        yield "could not remap a broken memory row (replace it)"
    elif rows is not None and rows[2]:
        yield "has a broken memory row that is remapped at the next reset (reset it)"
    processes = ask("nvmlDeviceGetComputeRunningProcesses") or []
    if processes:
        yield f"is used by process {', '.join(str(process.pid) for process in processes)} (end it)"
    memory = ask("nvmlDeviceGetMemoryInfo")
    if memory is not None and not processes and memory.free < _FREE_SHARE * memory.total:
        used = format_bytes(memory.total - memory.free, digits=0)
        yield f"has {used} in use by a process that is invisible here (find it with `nvidia-smi`)"
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    if reasons & nvml.nvmlClocksThrottleReasonHwThermalSlowdown:
        yield "is slowed down for its temperature (look at the cooling)"
    if reasons & nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown:
        yield "is slowed down for want of power (look at the supply)"
