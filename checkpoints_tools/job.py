"""The processes of a conversion: a single one, or those of torchrun, srun or mpirun. Always on the
CPU: a conversion moves bytes, and the machine's GPUs may belong to somebody else.

Call `leave_gpus_alone` before anything imports Megatron, so before megatron_dapo.models.
"""

import hashlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from checkpoints_tools.command_line import exit_code, rank, signals_as_exit
from megatron_dapo.common.addresses import LOOPBACK
from megatron_dapo.common.errors import JobError, MissingRanksError, UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, USER_ERROR_EXIT_CODE, signal_exit_code
from megatron_dapo.estimates.pipeline import pipeline_split
from megatron_dapo.huggingface.model_spec import ModelSpec

if TYPE_CHECKING:
    from megatron_dapo.platform.parallel import ParallelLayout

Result = TypeVar("Result")

_FIRST_PORT, _NUM_PORTS = 20000, 20000
# between two collectives one rank may read or write everything that it has
TIMEOUT_S = 4 * 3600.0
_LAST_WAIT_S = 30.0
_PEER_IS_GONE = re.compile(r"Connection (?:closed|reset) by peer(?: \[[^]]+\])?")  # gloo's words


def run(work: "Callable[[ConversionRanks], int | None]") -> int:
    """Run a command in several processes and return its exit code: they fail together, and the
    first one reports why."""

    def joined() -> int | None:
        try:
            job = ConversionRanks()
            try:
                return work(job)
            except UserError as error:
                if came:  # torch makes a full disk of an exit in the middle of its writing
                    raise SystemExit(signal_exit_code(came[0])) from error
                job.fail(error)
                return USER_ERROR_EXIT_CODE
            except RuntimeError as error:
                lost = _PEER_IS_GONE.search(str(error))
                is_missing = isinstance(error, MissingRanksError)
                if came or not (lost or is_missing):
                    raise
                reason = lost[0] if lost else str(error)
                print(f"Another process was lost, perhaps killed for its memory ({reason}).", file=sys.stderr)
                return FAILED_EXIT_CODE
            finally:
                job.leave()
        except UserError:  # before there was a group
            if rank() == 0:
                raise
            return USER_ERROR_EXIT_CODE

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    leave_gpus_alone()
    try:
        with signals_as_exit() as came:
            return exit_code(joined)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ.update({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})


def leave_gpus_alone() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


class ConversionRanks:
    """The processes as one. Collective methods: every process calls them at the same point."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        # before the group exists: its functions keep the current group as their default. Its
        # threads would otherwise
        # outlive `leave`, and some fail at the end of the interpreter (exit code 134)
        import torch.distributed.nn.functional

        from megatron_dapo.platform import stores
        from megatron_dapo.platform.agreement import Agreement

        os.environ.update(torchrun_variables(os.environ))
        if "RANK" in os.environ:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", timeout=timeout, **stores.rendezvous(timeout))
        self.agreement = Agreement(None, TIMEOUT_S)
        self.rank = self.agreement.rank
        self.world_size = self.agreement.size
        self.is_main = self.rank == 0

    def on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Return every process's own result of the work; if it failed in one of them, raise
        UserError in all. Collective."""
        return self.agreement.each("the conversion", _attempt, work)

    def on_main_rank(self, work: Callable[[], Result]) -> Result | None:
        """Do the work in the first process, and return its result there; if it failed, raise
        UserError in all. Collective."""
        return self.agreement.each("the conversion", lambda: _attempt(work) if self.is_main else None)

    def gather(self, value: Any) -> list:
        """Return every process's value, on all of them. Collective."""
        return self.agreement.gather(value)

    @contextmanager
    def layout(self, spec: ModelSpec, tp: int | None, pp: int | None) -> "Iterator[ParallelLayout]":
        """Make the model-parallel groups that cut the model, yield them, and release them after the
        block.

        The call is collective. Raise UserError for sizes that do not fit.
        """
        from megatron_dapo.platform.parallel import ParallelLayout

        tp, pp = choose_sizes(spec, self.world_size, tp, pp)
        # the processes that cut a layer share its experts out; Megatron computes these under
        # sequence parallelism only
        ep = math.gcd(tp, spec.moe.num_experts) if spec.moe else 1
        layout = ParallelLayout.initialize(tp=tp, pp=pp, ep=ep, sp=spec.moe is not None, timeout_s=TIMEOUT_S)
        try:
            yield layout
        finally:
            layout.release()

    def fail(self, error: UserError) -> None:
        """Have the first process report the error, and the others wait for it: launchers end the
        rest after the first failure."""
        import torch.distributed as dist

        if self.is_main:
            print(error.report(), file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # one of them is gone
            dist.monitored_barrier(timeout=timedelta(seconds=_LAST_WAIT_S))

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def _attempt(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except JobError as error:
        raise UserError(f"The output was not written: {error}; free some space, or give another folder.") from error
    except OSError as error:
        place = f"`{error.filename}`" if error.filename else "A file"
        raise UserError(f"{place} could not be read or written ({error.strerror or error}).") from error


def choose_sizes(spec: ModelSpec, world_size: int, tp: int | None, pp: int | None) -> tuple[int, int]:
    """Return (tp, pp). By default pipeline stages, which can work separately, if each has a
    layer."""
    if tp is None and pp is None:
        tp = 1 if world_size <= spec.num_layers else world_size
    tp = tp or max(1, world_size // (pp or 1))
    pp = pp or max(1, world_size // tp)
    if tp * pp != world_size:
        started = "1 was" if world_size == 1 else f"{world_size} were"
        raise UserError(
            f"--tp {tp} x --pp {pp} is {tp * pp} processes, but {started} started; start as many as that, or leave "
            "both out."
        )
    if pipeline_split(spec.num_layers, pp, 1).has_idle_chunk:
        raise UserError(f"--pp {pp} is more than the model's {spec.num_layers} layers can fill; lower it.")
    sizes = {"key-value heads": spec.num_kv_heads, "heads": spec.num_heads}
    if spec.num_moe_layers < spec.num_layers:
        sizes["intermediate_size"] = spec.dense_ffn_size
    if spec.moe is not None and spec.moe.shared_ffn_size:
        sizes["n_shared_experts x moe_intermediate_size"] = spec.moe.shared_ffn_size
    for name, size in sizes.items():
        if size % tp:
            raise UserError(f"--tp {tp} does not divide the model's {size} {name}; choose a divisor, or use --pp.")
    return tp, pp


def torchrun_variables(environment: dict[str, str] | os._Environ) -> dict[str, str]:
    """Return torchrun's variables, from those of srun or mpirun; {} under torchrun, or for a single
    process."""
    for size_name, rank_name, local_rank_name, job_name in _LAUNCHERS:
        if "RANK" in environment or int(environment.get(size_name, "1")) < 2:
            continue
        digest = hashlib.sha256(f"{environment.get(job_name)}.{environment.get('SLURM_STEP_ID')}".encode()).digest()
        return {
            "RANK": environment[rank_name],
            "WORLD_SIZE": environment[size_name],
            "LOCAL_RANK": environment.get(local_rank_name, "0"),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(environment),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + int.from_bytes(digest[:4]) % _NUM_PORTS),
        }
    return {}


# number of processes, this one's number, its number on the node, the job's id
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "HYDI_CONTROL_FD"),
)


def _first_host(environment: dict[str, str] | os._Environ) -> str:
    """Return the first node of the Slurm step; this machine if mpirun started all processes
    here."""
    if nodes := environment.get("SLURM_STEP_NODELIST"):
        match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
        if match is None:
            raise UserError(f"SLURM_STEP_NODELIST is {nodes}, which names no node; give MASTER_ADDR.")
        name, first = match.groups()
        return name + (first or "")
    local, size = (environment.get(f"OMPI_COMM_WORLD_{name}") for name in ("LOCAL_SIZE", "SIZE"))
    if local == size:
        return LOOPBACK
    raise UserError("mpirun started processes on several nodes; give the address of the first: -x MASTER_ADDR=HOST.")
