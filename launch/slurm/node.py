"""A role's task on one node: interface, limits and cache folders of this node, then the role's
program. Its end goes into a file for the others."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from launch.process_names import task_name
from launch.slurm.plan import KILLED_AS_ONE, TRAINER, JobPlan
from megatron_dapo.common.addresses import local_address_towards, node_name
from megatron_dapo.common.child_environment import COMMON, cache_folder
from megatron_dapo.common.ends import End, EndKind, end_of_code
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.common.signals import SignalReceiver

CANCELLED = "cancelled"  # a file in the attempt's folder of logs
# compiled code: thousands of small files that every process of the node reads
_CACHES = (
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    # else below ~, built under a lock
    *("FLASHINFER_WORKSPACE_BASE", "SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR"),
)
_POLL_INTERVAL_S = 0.5
_CANCEL_GRACE_S = 10.0  # Slurm's KillWait, after which it kills, is 30 by default
_LAST_WORDS_S = 40.0  # torchrun gives its other ranks 30 before it names the failed one


def run(plan: JobPlan, role: str) -> int:
    """Return the program's exit code; but 0 for a trainer asked to stop and saved (85). On any
    other code Slurm would end the others, perhaps in the middle of saving."""
    node = node_name()
    orders = Orders(Path(plan.logs), role, node)
    try:
        end = end_of_code(orders.obey(start(plan, role, node)))
    except UserError as error:
        print(error.report(), flush=True)
        end = End(EndKind.USER_ERROR, USER_ERROR_EXIT_CODE, error.sentences[0])
    plan.ends.write(task_name(role, node), end)
    code = end.exit_code
    if role == TRAINER and code == SAVED_EXIT_CODE:
        return 0
    if role in KILLED_AS_ONE and code:
        wait_for_peers(plan, role, orders)
    return code


def start(plan: JobPlan, role: str, node: str) -> subprocess.Popen:
    """Start the role's program. Raises UserError if this node is unfit for it."""
    peers = [name for name in plan.nodes if name != node]
    interface = _interface_towards(peers[0]) if peers else None
    environment = node_environment(os.environ, interface, cache_folder(os.environ))
    limits = _raise_limits()
    print(f"{node}: {role}, interface {interface or 'none needed'}, {limits}", flush=True)
    return subprocess.Popen(
        plan.command(role, node),
        env=environment | plan.ends.variables(),
        start_new_session=True,
        # with cgroups Slurm ends all of a task's processes; otherwise only the task
        preexec_fn=partial(end_with_parent, os.getpid()),
    )


def wait_for_peers(plan: JobPlan, role: str, orders: "Orders") -> None:
    """Wait until the role has ended on all nodes.

    Slurm ends the others as soon as one task fails. The first to fail may have lost a peer that has
    not reported its error yet.
    """
    deadline = time.monotonic() + _LAST_WORDS_S
    while len(ends(plan, role)) < len(plan.of_role(role)) and time.monotonic() < deadline:
        if orders.is_to_end():
            return
        time.sleep(_POLL_INTERVAL_S)


class Orders:
    """Signals to the task, and their meaning for its program.

    The program does not get them: it has its own session, and with cgroups Slurm signals only the
    task. SIGINT comes from the job's script, and asks the program to end. SIGTERM comes from Slurm,
    before it takes the nodes, or from a user: but the servers are needed until the trainer has
    saved. So the trainer's task passes the request to the script (a file `asked-NODE`). The program
    continues until the script, which knows the job's state, reports the job as cancelled (the file
    `cancelled`), or sends SIGINT.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self, logs: Path, role: str, node: str) -> None:
        self._asked = logs / f"asked-{node}" if role == TRAINER else None
        self._cancelled = logs / CANCELLED
        self._received = SignalReceiver(self.SIGNALS).install().received

    def obey(self, program: subprocess.Popen) -> int:
        """Wait for the program; its exit code, as `subprocess` gives it."""
        code, asked_at = None, None
        while code is None:
            try:
                code = program.wait(_POLL_INTERVAL_S)
            except subprocess.TimeoutExpired:
                if asked_at is None and self.is_to_end():
                    program.terminate()
                    asked_at = time.monotonic()
                elif asked_at is not None and self._is_cancelled() and time.monotonic() - asked_at > _CANCEL_GRACE_S:
                    # a trainer may wait for dead servers; Slurm kills only the task
                    _kill_all(program.pid)
            self._ask()
        return code

    def is_to_end(self) -> bool:
        return signal.SIGINT in self._received or self._is_cancelled()

    def _is_cancelled(self) -> bool:
        return bool(self._received) and self._cancelled.exists()

    def _ask(self) -> None:
        """Tell the script that Slurm asked this task to end, if it did."""
        order = next((number for number in self._received if number != signal.SIGINT), None)
        if order is None or self._asked is None:
            return
        try:
            write_whole(self._asked, order.name.removeprefix("SIG"))
            self._asked = None
        except OSError as error:  # a full disk: the next time; the trainer is not given up for it
            print(f"cannot write {self._asked}: {error}", flush=True)


def _kill_all(pid: int) -> None:
    """Kill a process and all that it started."""
    import psutil

    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def ends(plan: JobPlan, role: str) -> dict[str, End]:
    """Return node -> end of a role's program, for nodes on which it has ended."""
    by_node = {node: plan.ends.read(task_name(role, node)) for node in plan.of_role(role)}
    return {node: end for node, end in by_node.items() if end is not None}


def node_environment(inherited: Mapping[str, str], interface: str | None, caches: Path) -> dict[str, str]:
    """Return the program's environment: the user's, with COMMON's values on top."""
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    environment |= {name: str(caches / name.lower()) for name in _CACHES}
    if interface:  # for NCCL's sockets and its bootstrap; NCCL finds InfiniBand adapters itself
        environment |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    return environment | dict(inherited) | COMMON


def _interface_towards(host: str) -> str | None:
    """Return the network interface towards a host, or None if unknown."""
    import psutil

    try:
        address = local_address_towards(host)
    except OSError:
        return None  # the preflight reports the wrong name
    return interface_of(address, {name: [a.address for a in all_] for name, all_ in psutil.net_if_addrs().items()})


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """Return the name of the interface with this address, or None.

    IPv6 addresses are listed with their scope (fe80::1%eth0).
    """
    for name, addresses in interfaces.items():
        if address in (known.partition("%")[0] for known in addresses):
            return name
    return None


def _raise_limits() -> str:
    """Raise the limits of open files, locked memory (RDMA) and processes as far as this user may.

    Return the new limits in words.
    """
    words = []
    kinds = (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK))
    for name, kind in (*kinds, ("processes", resource.RLIMIT_NPROC)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))
        words.append(f"{name} {'unlimited' if hard == resource.RLIM_INFINITY else hard}")
    return ", ".join(words)
