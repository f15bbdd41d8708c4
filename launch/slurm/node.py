"""A role's task on one node: interface, limits and cache folders of this node, then the role's program, then how it
ended, in a file that the others see."""

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
    *("FLASHINFER_WORKSPACE_BASE", "SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR"),  # else below ~, built under a lock
)
_POLL_INTERVAL_S = 0.5
_CANCEL_GRACE_S = 10.0  # Slurm's KillWait, after which it kills, is 30 as it comes
_LAST_WORDS_S = 40.0  # torchrun gives its other ranks 30 before it tells which one failed


def run(plan: JobPlan, role: str) -> int:
    """Return the exit code: the program's; but 0 where the trainer was asked to stop and saved (85): Slurm would end
    the others, which may still be at it, for any other code."""
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
    """Start the role's program. Raises UserError where this node is not fit for it."""
    peers = [name for name in plan.nodes if name != node]
    interface = interface_towards(peers[0]) if peers else None
    environment = node_environment(os.environ, interface, cache_folder(os.environ))
    limits = raise_limits()
    print(f"{node}: {role}, interface {interface or 'none needed'}, {limits}", flush=True)
    return subprocess.Popen(
        plan.command(role, node),
        env=environment | plan.ends.variables(),
        start_new_session=True,
        # Slurm ends all of a task's processes where it keeps them in cgroups; elsewhere the task alone
        preexec_fn=partial(end_with_parent, os.getpid()),
    )


def wait_for_peers(plan: JobPlan, role: str, orders: "Orders") -> None:
    """Wait until the role has ended on all nodes: Slurm ends the others at once when the task of one fails, and the
    first to fail may be one that lost a peer, which has not told yet what it died of."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while len(ends(plan, role)) < len(plan.of_role(role)) and time.monotonic() < deadline:
        if orders.is_to_end():
            return
        time.sleep(_POLL_INTERVAL_S)


class Orders:
    """Signals to the task, and what they mean for its program, which does not get them: it has a session of its own,
    and of a job in cgroups Slurm signals the task alone.

    SIGINT is the job's script's: the program is asked to end. SIGTERM is Slurm's, before it takes the nodes, and so is
    what a user sends to the steps: the servers are needed until the trainer has saved. So the trainer's task asks the
    script for that (a file `asked-NODE`), and the program goes on until the script, which knows the job's state, has
    said that the job was cancelled (the file `cancelled`), or sends SIGINT.
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
                    kill_all(program.pid)  # a trainer that waits for servers which are gone; Slurm kills the task alone
            self._ask()
        return code

    def is_to_end(self) -> bool:
        return signal.SIGINT in self._received or self._is_cancelled()

    def _is_cancelled(self) -> bool:
        return bool(self._received) and self._cancelled.exists()

    def _ask(self) -> None:
        """Tell the script, if Slurm has told this task to end."""
        order = next((number for number in self._received if number != signal.SIGINT), None)
        if order is None or self._asked is None:
            return
        try:
            write_whole(self._asked, order.name.removeprefix("SIG"))
            self._asked = None
        except OSError as error:  # a full disk: the next time; the trainer is not given up for it
            print(f"cannot write {self._asked}: {error}", flush=True)


def kill_all(pid: int) -> None:
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
    """Return node -> how a role's program ended there, of the nodes on which it has ended."""
    by_node = {node: plan.ends.read(task_name(role, node)) for node in plan.of_role(role)}
    return {node: end for node, end in by_node.items() if end is not None}


def node_environment(inherited: Mapping[str, str], interface: str | None, caches: Path) -> dict[str, str]:
    """Return the program's environment; what it inherits from the user stays, except for what COMMON sets."""
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    environment |= {name: str(caches / name.lower()) for name in _CACHES}
    if interface:  # of NCCL's sockets and its bootstrap; which InfiniBand adapters there are, NCCL finds out
        environment |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    return environment | dict(inherited) | COMMON


def interface_towards(host: str) -> str | None:
    """Return the network interface from which a host is reached; None where that cannot be told."""
    import psutil

    try:
        address = local_address_towards(host)
    except OSError:
        return None  # the preflight says what is wrong with this name
    return interface_of(address, {name: [a.address for a in all_] for name, all_ in psutil.net_if_addrs().items()})


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """Return the name of the interface that has the address, or None where no interface has it.

    IPv6 addresses are listed with their scope (fe80::1%eth0).
    """
    for name, addresses in interfaces.items():
        if address in (known.partition("%")[0] for known in addresses):
            return name
    return None


def raise_limits() -> str:
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
