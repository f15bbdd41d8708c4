"""The CPU's stand-in for the memory of GPUs: who holds how many bytes, for tests of shared GPUs.

Trainer ranks and servers on a CPU append to one file per GPU what they take and give back. It
exists only with the variable MEGATRON_DAPO_LEDGER, a folder. Variables of a process:

    MEGATRON_DAPO_LEDGER_GPUS   its GPUs' numbers, with commas: one for all its ranks, or one per
                                  rank; without it a rank's number is the GPU's
    MEGATRON_DAPO_LEDGER_BYTES  memory of one GPU; without it there is no limit
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

FOLDER = "MEGATRON_DAPO_LEDGER"
GPUS = "MEGATRON_DAPO_LEDGER_GPUS"
BYTES = "MEGATRON_DAPO_LEDGER_BYTES"


@dataclass(frozen=True)
class CpuLedger:
    """The ledger of one GPU."""

    path: Path
    """A line of JSON per change, in order: time, pid, started, holder, bytes, what."""
    num_bytes: int | None
    """The GPU's memory; None: without limit."""

    def take(self, holder: str, num_bytes: int, what: str) -> None:
        """Book memory of this process.

        Raises:
            MemoryError: if less is free; it names the holders.
        """
        with self._locked() as file:
            held = _held(file)
            free = None if self.num_bytes is None else self.num_bytes - held.total()
            if free is not None and num_bytes > free:
                holders = ", ".join(f"{name} {held[name]}" for name in sorted(held)) or "nobody"
                raise MemoryError(
                    f"{holder} needs {num_bytes} bytes for {what}, but {self.path.stem} has {free} of {self.num_bytes} "
                    f"free; held by {holders}"
                )
            _append(file, holder, num_bytes, what)

    def give(self, holder: str, num_bytes: int, what: str) -> None:
        """Book that this process has given memory back."""
        with self._locked() as file:
            _append(file, holder, -num_bytes, what)

    def held(self) -> Counter[str]:
        """Return the bytes of each holder's living processes."""
        with self._locked() as file:
            return _held(file)

    def free_bytes(self) -> int | None:
        """Return the bytes that nobody holds; None without a limit."""
        return None if self.num_bytes is None else self.num_bytes - self.held().total()

    @contextmanager
    def _locked(self) -> Iterator[TextIO]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def ledger_of(rank: int) -> CpuLedger | None:
    """Return the ledger of a rank's GPU; None if no ledger is kept.

    rank: of a trainer on its node, or of a server.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    numbers = os.environ.get(GPUS, "").split(",")
    number = (numbers[rank] if len(numbers) > 1 else numbers[0]) or str(rank)
    limit = os.environ.get(BYTES)
    return CpuLedger(Path(folder, f"gpu{number}.jsonl"), int(limit) if limit else None)


def _append(file: TextIO, holder: str, num_bytes: int, what: str) -> None:
    pid = os.getpid()
    fields = dict(time=time.time(), pid=pid, started=_started(pid), holder=holder, bytes=num_bytes, what=what)
    file.write(json.dumps(fields) + "\n")
    file.flush()  # before the lock goes


def _held(file: TextIO) -> Counter[str]:
    file.seek(0)
    of_process: Counter[tuple[str, int, int]] = Counter()
    for line in file:
        fields = json.loads(line)
        of_process[fields["holder"], fields["pid"], fields["started"]] += fields["bytes"]
    held: Counter[str] = Counter()
    for (holder, pid, started), num_bytes in of_process.items():
        if num_bytes and _started(pid) == started:
            held[holder] += num_bytes
    return held


def _started(pid: int) -> int | None:
    """Return the start of a process in clock ticks after the machine's; None if it has ended."""
    try:
        # the name, in brackets, may contain spaces and brackets
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(fields[18])
