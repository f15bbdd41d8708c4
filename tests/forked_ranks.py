"""Ranks without imports: forks of one process with torch, Megatron and the workers' other modules.

A rank gets the same as from torchrun: its variables, a process of its own, a file as `__main__`.
Four of them start in half a second, under torchrun in ten; tests of torchrun's own behaviour use
`helpers.run_torchrun`.
"""

import multiprocessing
import multiprocessing.context
import os
import runpy
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from tests.helpers import REPOSITORY, TAIL, free_port

PRELOADED = "tests.preloaded"
_LEAST_SHARE = 0.005
"""Of a core: ranks waiting for one another take less, with all their polling threads. Computing
ranks get more, even on a machine with a hundred other processes."""


def run_ranks(path: Path, nproc: int, *args: str, stuck_s: float = 120.0) -> str:
    """Run a Python file in nproc processes; their standard output, rank after rank.

    Raises AssertionError with the end of every rank's output when one of them fails, or when none
    of them has computed for `stuck_s` seconds. Their time in all depends on the machine's other
    work. No rank is left behind.
    """
    context = fork_server()
    names = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryDirectory(prefix="ranks-") as logs:
        ranks = []
        for rank in range(nproc):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {name: str(value) for name, value in names.items()}
            ranks.append(context.Process(target=_rank, args=(str(path), args, environment, f"{logs}/{rank}")))
        try:
            for process in ranks:
                process.start()
            failure = _first_failure(ranks, stuck_s)
        finally:
            for process in (process for process in ranks if process.pid is not None):
                process.kill()
                process.join()
        if failure:
            raise AssertionError(f"{path.name} on {nproc} processes: {failure}\n{_tails(Path(logs))}")
        return "".join(Path(f"{logs}/{rank}.stdout").read_text(errors="replace") for rank in range(nproc))


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Its processes are forks of one server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def _first_failure(ranks: list, stuck_s: float) -> str | None:
    """None when all have ended well."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    computed_before = 0.0
    while running:
        ended = wait(list(running), stuck_s)
        if not ended:
            computed = sum(_computed_s(ranks[rank].pid) for rank in running.values())
            if computed - computed_before < _LEAST_SHARE * stuck_s:
                return f"ranks {sorted(running.values())} have not computed for {stuck_s:g} s"
            computed_before = computed
        for rank in (running.pop(sentinel) for sentinel in ended):
            ranks[rank].join()
            if ranks[rank].exitcode:
                return f"rank {rank} ended with exit code {ranks[rank].exitcode}"
            computed_before = 0.0  # its seconds are no longer in the sum
    return None


def _computed_s(pid: int) -> float:
    """The CPU seconds of a process; 0 for one just ended."""
    import psutil  # here, because the GPU tests run without it, with short tests only

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _rank(path: str, args: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _tails(logs: Path) -> str:
    texts = [(log.name, log.read_text(errors="replace").strip()[-TAIL:]) for log in sorted(logs.iterdir())]
    return "\n".join(f"--- rank {name}\n{text}" for name, text in texts if text)
