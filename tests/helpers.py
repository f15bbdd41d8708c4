"""Shared by the tests of several folders: a module or a file under torchrun, and free ports."""

import errno
import os
import random
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TAIL = 4000  # characters of each process's output that a failure shows
FIRST_PORT = 10_000  # below it are those of well-known services
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(number: int = 1) -> int:
    """The first of `number` TCP ports in a row that are free on the loopback interface right now.

    They lie below the kernel's own range, for connections and requests of port 0. A port of that
    range can be taken again before its use. They are drawn anew in every process, and not from the
    seeds of a test.
    """
    first_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0])
    # the kernel gives out all of them
    end = first_ephemeral if first_ephemeral > 2 * FIRST_PORT else 2**16
    while True:
        first = random.SystemRandom().randrange(FIRST_PORT, end - number)
        try:
            with ExitStack() as held:
                for port in range(first, first + number):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def be_rank_of_another_host(rank: int) -> None:
    """Make this process a local rank that NCCL takes on a shared device: with different host names,
    ranks talk over the loopback interface. On a machine with a GPU for each rank it takes its
    own."""
    # a child inherits its parent's
    os.environ |= {"LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def run_module(*arguments: str, timeout: float = 560) -> str:
    """`python -m ARGUMENTS` in the repository as a user starts it; its standard output. Raises
    AssertionError with the end of its output if it fails, subprocess.TimeoutExpired if it does not
    end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-TAIL:]}\n{done.stderr[-TAIL:]}"
    return done.stdout


def run_torchrun(path: Path, nproc: int, *args: str, timeout: float = 240) -> str:
    """Run a Python file in nproc processes under torchrun; their standard output, rank after rank.

    Raises AssertionError with the end of every rank's output when one of them fails or outlasts
    `timeout` seconds. No process is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc}"),
            *(f"--log-dir={logs}", "--redirects=3", str(path), *args),
        ]
        path_entries = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path_entries)}
        agent_log = Path(logs) / "agent.log"
        with agent_log.open("w") as agent_output:
            agent = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=agent_output, stderr=subprocess.STDOUT
            )
        try:
            failure = f"exit code {code}" if (code := agent.wait(timeout)) else None
        except subprocess.TimeoutExpired:
            failure = f"no end after {timeout:.0f} s"
        finally:
            _end(agent)
        if failure:
            raise AssertionError(f"{path.name} on {nproc} processes: {failure}\n{_tails(Path(logs), agent_log)}")
        return "".join(log.read_text(errors="replace") for log in _rank_logs(Path(logs), "stdout.log"))


def _rank_logs(logs: Path, name: str) -> list[Path]:
    return sorted(logs.glob(f"*/attempt_*/*/{name}"), key=lambda log: int(log.parent.name))


def _tails(logs: Path, agent_log: Path) -> str:
    parts = [("torchrun", agent_log)]
    for name in ("stdout.log", "stderr.log"):
        parts += [(f"rank {log.parent.name} {log.stem}", log) for log in _rank_logs(logs, name)]
    texts = [(title, log.read_text(errors="replace").strip()[-TAIL:]) for title, log in parts]
    return "\n".join(f"--- {title}\n{text}" for title, text in texts if text)


def _end(agent: subprocess.Popen) -> None:
    """torchrun's workers have sessions of their own:
    ending its process group would leave them running."""
    if agent.poll() is not None:
        return
    import psutil  # here, because the GPU tests run without it, with nothing to hang

    processes = [*psutil.Process(agent.pid).children(recursive=True), agent]
    for process in processes:
        process.kill()
    agent.wait(30)
