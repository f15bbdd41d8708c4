"""The CPU's stand-in for the memory of GPUs: what is taken is missing until it is given back."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest

from megatron_dapo.platform import device
from megatron_dapo.platform.cpu_ledger import CpuLedger, ledger_of

pytestmark = pytest.mark.unit

TAKES = """
import sys
from pathlib import Path
from megatron_dapo.platform.cpu_ledger import CpuLedger
for line in sys.stdin:
    number = int(line)
    ledger = CpuLedger(Path(sys.argv[1]), int(sys.argv[2]))
    try:
        (ledger.take if number > 0 else ledger.give)("server", abs(number), "weights")
        print("done", flush=True)
    except MemoryError:
        print("refused", flush=True)
"""


@pytest.fixture
def ledger(tmp_path) -> CpuLedger:
    return CpuLedger(tmp_path / "ledger" / "gpu0.jsonl", 100)


class Taker:
    """Another process, which takes and gives as it is told."""

    def __init__(self, ledger: CpuLedger) -> None:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, "-c", TAKES, str(ledger.path), str(ledger.num_bytes)], **pipes)

    def book(self, *numbers: int) -> None:
        for number in numbers:
            self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        for _ in numbers:
            assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def taker(ledger) -> Iterator[Taker]:
    taker = Taker(ledger)
    yield taker
    taker.end()


def test_what_is_taken_is_missing_until_it_is_given_back(ledger):
    assert ledger.free_bytes() == 100 and not ledger.held()
    ledger.take("trainer", 70, "weights")
    ledger.take("trainer", 10, "gradients")
    assert ledger.free_bytes() == 20 and ledger.held() == {"trainer": 80}
    ledger.give("trainer", 70, "weights")
    assert ledger.free_bytes() == 90


def test_more_than_is_free_is_refused_with_the_names_of_the_holders(ledger, taker):
    taker.book(60)
    ledger.take("trainer", 40, "weights")  # all of it
    with pytest.raises(MemoryError, match=r"trainer needs 1 bytes for states.*0 of 100.*server 60, trainer 40"):
        ledger.take("trainer", 1, "states")
    assert ledger.held() == {"server": 60, "trainer": 40}  # the refused bytes were not booked


def test_the_dead_hold_nothing(ledger, taker):
    taker.book(60)
    assert ledger.free_bytes() == 40
    taker.process.kill()
    taker.process.wait()
    assert ledger.free_bytes() == 100
    ledger.take("trainer", 100, "weights")


def test_a_process_not_yet_waited_for_is_dead_too(ledger, taker):
    taker.book(60)
    taker.process.kill()
    os.waitid(os.P_PID, taker.process.pid, os.WEXITED | os.WNOWAIT)
    assert ledger.free_bytes() == 100


def test_a_later_process_of_the_same_number_does_not_hold_the_bytes_of_the_dead(ledger):
    ledger.take("server", 60, "weights")
    (line,) = ledger.path.read_text().splitlines()
    ledger.path.write_text(json.dumps(json.loads(line) | {"started": 1}) + "\n")
    assert ledger.free_bytes() == 100


def test_a_line_tells_who_took_what_and_when(ledger):
    ledger.take("trainer", 70, "weights")
    ledger.give("trainer", 20, "weights")
    first, second = map(json.loads, ledger.path.read_text().splitlines())
    assert (first["pid"], first["holder"], first["what"]) == (os.getpid(), "trainer", "weights")
    assert (first["bytes"], second["bytes"]) == (70, -20) and first["time"] <= second["time"]


def test_who_asks_while_another_looks_waits_and_sees_its_bytes(ledger, taker):
    ledger.take("trainer", 50, "weights")
    with ledger.path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        taker.process.stdin.write("50\n")
        taker.process.stdin.flush()
        while not is_waiting_for_a_lock(taker.process.pid):
            assert not select([taker.process.stdout], [], [], 0.01)[0], "it did not wait"
        file.write(ledger.path.read_text().replace(": 50", ": 1"))
    assert taker.process.stdout.readline() == "refused\n"
    assert ledger.held() == {"trainer": 51}


def is_waiting_for_a_lock(pid: int) -> bool:
    lines = Path("/proc/locks").read_text().splitlines()
    return any(line.split()[1] == "->" and str(pid) in line.split() for line in lines)


def test_processes_that_write_at_once_lose_no_line(tmp_path):
    ledger = CpuLedger(tmp_path / "gpu0.jsonl", 1000)
    takers = [Taker(ledger) for _ in range(2)]
    for taker in takers:
        taker.process.stdin.write("3\n-1\n" * 100)
        taker.process.stdin.flush()
    for taker in takers:
        for _ in range(200):
            assert taker.process.stdout.readline() == "done\n"
    assert ledger.held() == {"server": 2 * 100 * 2}
    for taker in takers:
        taker.end()


@pytest.mark.parametrize(
    ("gpus", "rank", "name"), [("4,5", 0, "gpu4"), ("4,5", 1, "gpu5"), ("4", 1, "gpu4"), ("", 1, "gpu1")]
)
def test_a_ranks_gpu_is_its_entry_in_the_variable(monkeypatch, tmp_path, gpus, rank, name):
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER", str(tmp_path))
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER_GPUS", gpus)
    assert ledger_of(rank).path.stem == name


def test_the_free_bytes_of_a_cpu_are_those_of_its_ledger(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "is_gpu", lambda: False)
    monkeypatch.delenv("MEGATRON_DAPO_LEDGER", raising=False)
    assert device.free_bytes() is None
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    ledger_of(1).take("server", 30, "weights")
    assert device.free_bytes() is None  # no limit
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER_BYTES", "100")
    assert device.free_bytes() == 70
    with pytest.raises(MemoryError, match="server 30"):
        ledger_of(1).take("trainer", 71, "weights")
