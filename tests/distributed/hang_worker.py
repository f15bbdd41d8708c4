"""Jobs of two ranks that hang, or do not: python hang_worker.py FOLDER. Prints their ends as JSON.

Every rank is a fork of this process, which has imported torch:
the import takes longer than the jobs.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.checkpointing.pending_save import PendingSave
from megatron_dapo.platform import watchdog
from megatron_dapo.platform.agreement import Agreement
from megatron_dapo.platform.watchdog import PUBLISH_INTERVAL_S, Watchdog
from tests.helpers import free_port

WORLD, LIMIT_S, DEADLINE_S, WRITING_S = 2, 5.0, 60.0, 8.0


def sleep_in_update(rank: int) -> None:
    if rank == 1:
        time.sleep(3600)


def sleep_before_update(rank: int) -> None:
    if rank == 0:
        with watchdog.phase("rollout"):
            time.sleep(3600)


def stop(number: int) -> Callable[[int], None]:
    def stop_rank(rank: int) -> None:
        if rank == number:
            os.kill(os.getpid(), signal.SIGSTOP)

    return stop_rank


def write_for_ever(rank: int) -> None:
    """As with the hanging storage of one node: the process writing its part
    of a checkpoint never ends."""
    agreement = Agreement(None, DEADLINE_S)
    write = lambda: time.sleep(3600 if rank == 1 else 0) or []  # noqa: E731
    pending = PendingSave(agreement, Path("folder"), write, lambda results: None, background=True)
    with watchdog.phase("checkpoint"):
        pending.finish()


def leave_late(rank: int) -> None:
    """The other rank leaves, and is silent for longer than the limit."""


SCENARIOS: dict[str, Callable[[int], None]] = {
    "rank 1 sleeps in update": sleep_in_update,
    "rank 0 sleeps in rollout": sleep_before_update,
    "rank 1 is stopped": stop(1),
    "rank 0 is stopped": stop(0),
    "no file is written": sleep_in_update,
    "rank 1 writes for ever": write_for_ever,
    "nobody hangs": leave_late,
}


def train(rank: int, trouble: Callable[[int], None], folder: Path) -> None:
    """Three steps, with trouble in the last; rank 1 leaves at once,
    rank 0 after more than the limit."""
    watchdog._WRITING_S = WRITING_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    with Watchdog(Agreement(None, DEADLINE_S), folder / "hang", {"update": LIMIT_S}, 2 * LIMIT_S, LIMIT_S) as own:
        own.on_alarm = lambda: (folder / f"alarm-{rank}").touch()
        for step in range(1, 4):
            watchdog.begin_step(step)
            with watchdog.phase("distribute"):
                dist.all_reduce(torch.ones(1))
                # so that the others have heard of it
                time.sleep(2.5 * PUBLISH_INTERVAL_S * (step == 2))
            if step == 3 and trouble is sleep_before_update:
                trouble(rank)
            with watchdog.phase("update"):
                for _ in range(2):
                    watchdog.beat()
                    if step == 3:
                        trouble(rank)
                    dist.all_reduce(torch.ones(1))
        if rank == 0:
            time.sleep(LIMIT_S + 2.0)


def start(rank: int, trouble: Callable[[int], None], folder: Path, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        output = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        train(rank, trouble, folder)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def end_of(pid: int, deadline: float) -> int | None:
    """Exit code; None: still there after the deadline, and killed."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    root, jobs = Path(sys.argv[1]), {}
    for name, trouble in SCENARIOS.items():
        folder, port = root / name.replace(" ", "-"), free_port()
        folder.mkdir()
        # as on hanging storage: nobody reads, so none is ever opened
        if name == "no file is written":
            (folder / "hang").mkdir()
            for rank in range(WORLD):
                os.mkfifo(folder / "hang" / f"rank-{rank}.txt")
        jobs[name] = [start(rank, trouble, folder, port) for rank in range(WORLD)]
    stopped = {name: int(name.split()[1]) for name in SCENARIOS if "stopped" in name}
    codes: dict[str, list[int | None]] = {}
    for name, pids in jobs.items():
        live = {
            rank: end_of(pid, time.monotonic() + DEADLINE_S)
            for rank, pid in enumerate(pids)
            if rank != stopped.get(name)
        }
        codes[name] = [live[rank] if rank in live else end_of(pid, 0.0) for rank, pid in enumerate(pids)]
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
