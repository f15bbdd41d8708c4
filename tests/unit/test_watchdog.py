"""The blame for a hang, the measure of silence, and that nothing keeps a process from its end."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_dapo.common.exit_codes import HANG_EXIT_CODE
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.platform import watchdog
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.platform.watchdog import RankStatus, Watchdog, missing, sentence

pytestmark = pytest.mark.unit


def test_a_function_beside_the_run_that_blocks_is_named_by_its_line(tmp_path, monkeypatch):
    (tmp_path / "own_wait.py").write_text(
        "import sys\n\n\ndef f(line_of):\n    return line_of(sys._getframe())\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = OwnFunction.load("key", "own_wait:f")
    calls = [lambda answer: answer, "a line", "this test", watchdog._line_of]
    assert own(*calls).startswith("megatron_dapo/common/own_function.py:")  # installed elsewhere
    monkeypatch.setattr(watchdog, "_STARTED_IN", f"{tmp_path}/")
    assert own(*calls) == "own_wait.py:5"


def place(entered: int, beats: int = 0, waits: bool = False, **more: object) -> RankStatus:
    return RankStatus("node1", 7, step=3, phase="update", entered=entered, beats=beats, waits=waits, **more)


@pytest.mark.parametrize(
    ("places", "silent", "blamed"),
    [
        ({0: place(5), 2: place(4)}, {1}, [1]),  # one without an answer, at any place of the others
        ({0: place(5, waits=True), 1: place(4), 2: place(5, waits=True)}, set(), [1]),  # has not come to the phase
        ({0: place(5, 9, waits=True), 1: place(5, 9), 2: place(5, 9, waits=True)}, set(), [1]),  # in no collective
        ({0: place(5, 3, waits=True), 1: place(5, 4)}, set(), [1]),  # the first pipeline stage, ahead and stuck
        ({0: place(5, 9), 1: place(5, 8), 2: place(5, 8)}, set(), [1, 2]),  # did fewer micro-batches
        ({0: place(4, waits=True), 1: place(4), 2: place(5, waits=True)}, set(), [1]),
        ({0: place(5, 9)}, set(), [0]),
        ({0: place(5, 9), 1: place(5, 9)}, set(), []),  # all alike
        ({0: place(5, 9, waits=True), 1: place(5, 9, waits=True)}, set(), []),
    ],
)
def test_the_missing_ranks_are_the_awaited_ones(places, silent, blamed):
    assert missing(places, silent) == blamed


def test_if_no_rank_stands_out_all_positions_are_listed_up_to_a_number():
    said = sentence(
        "why", {rank: place(5, at="megatron_dapo/x.py:3") for rank in range(20)}, {}, set(), Path("logs/hang")
    )
    assert "\n" not in said and said.startswith("Hang: why; no rank stands out: rank 0 is in `update` of step 3 at ")
    assert "rank 7 " in said and "rank 8 " not in said and "and 12 more" in said and said.endswith("logs/hang")


def test_a_rank_that_has_left_is_told_from_one_that_does_not_answer():
    last = {1: place(4, has_left=True), 2: place(4)}
    said = sentence("why", {0: place(5)}, last, {1, 2}, Path("hang"))
    assert "rank 1 (process 7 on node1) has left, last in" in said
    assert "rank 2 (process 7 on node1) does not answer, last in" in said


def test_the_time_in_which_the_whole_process_was_stopped_is_no_silence(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    clock = watchdog._Clock()
    assert clock.age("rank 1", 1) == 0.0
    now[0] = 1.0
    clock.tick()
    assert clock.age("rank 1", 1) == 1.0
    now[0] = 3600.0
    clock.tick()
    assert clock.age("rank 1", 1) == 3.0
    assert clock.age("rank 1", 2) == 0.0


def test_a_phase_within_a_phase_gives_way_to_the_outer_one_again():
    here = watchdog._position
    with watchdog.phase("rollout"):
        began = here.entered
        with watchdog.phase("weight_sync"):
            watchdog.beat()
            assert (here.phase, here.entered, here.beats) == ("weight_sync", began + 1, 1)
        assert (here.phase, here.entered, here.beats) == ("rollout", began + 2, 0)
    assert here.phase == ""


def test_a_rank_that_waits_is_known_without_its_source_which_may_be_on_a_file_system_that_hangs():
    waits = {}
    for file in ("torch/distributed/c10d.py", "megatron_dapo/kernels/pending.py", "megatron_dapo/job.py"):
        look = lambda file=file: waits.update({file: watchdog._is_waiting(sys._getframe(1))})  # noqa: E731
        exec(compile("look()", f"/not/there/{file}", "exec"), {"look": look})
    assert list(waits.values()) == [True, True, False]
    assert not watchdog._is_waiting(None)


@pytest.mark.parametrize(("uses_gpu", "recorders"), [(False, ["gloo"]), (True, ["nccl", "gloo"])])
def test_nccls_record_is_kept_only_with_a_gpu_though_torch_always_has_one(uses_gpu, recorders, monkeypatch):
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.setattr(torch._C._distributed_c10d, name, lambda: "{}", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_gpu)
    assert list(watchdog._flight_records()) == [(recorder, b"{}") for recorder in recorders]


def last_words(folder: Path, log: int, trouble: Callable[[Watchdog], None]) -> int | None:
    """Exit code of a process that finds a hang, a fork of this one; None if it had to be killed."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(log, 2)
            sys.stderr = os.fdopen(2, "w")
            threading.excepthook = threading.__excepthook__  # and not pytest's
            own = Watchdog(SingleRank(), folder / "hang", {}, default_s=60.0, silence_s=60.0)
            trouble(own)
            own._end("why")
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def blocks(own: Watchdog) -> None:
    """Nobody reads: opening it never returns, as on a file system that hangs."""
    watchdog._WRITING_S = 0.1
    own._folder.mkdir()
    os.mkfifo(own._folder / "rank-0.txt")


def no_record(own: Watchdog) -> None:
    def fail() -> None:
        raise RuntimeError("no record")

    watchdog._flight_records = fail


def no_controller(own: Watchdog) -> None:
    def fail() -> None:
        raise ProcessLookupError

    own.on_alarm = fail


def no_patience(own: Watchdog) -> None:
    watchdog._LAST_RESORT_S = 0.1


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [(blocks, "took no stacks within 0.1 s"), (no_record, "no record"), (no_controller, "ProcessLookupError")],
)
def test_what_fails_or_hangs_at_the_end_keeps_no_rank_from_saying_who_is_missing(tmp_path, trouble, expected):
    with (tmp_path / "log").open("w") as log:
        assert last_words(tmp_path, log.fileno(), trouble) == HANG_EXIT_CODE
    *others, last = (tmp_path / "log").read_text().splitlines()
    assert last.startswith("Hang: why; missing: rank 0 ") and expected in "\n".join(others)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_log_that_hangs_or_is_gone_keeps_no_rank_from_its_end(tmp_path, is_full):
    reader, writer = os.pipe()
    try:
        if is_full:
            os.set_blocking(writer, False)
            while True:
                try:
                    os.write(writer, bytes(4096))
                except BlockingIOError:
                    break
            os.set_blocking(writer, True)
        else:
            os.close(reader)
        assert last_words(tmp_path, writer, no_patience) == HANG_EXIT_CODE
    finally:
        os.close(writer)
        if is_full:
            os.close(reader)
