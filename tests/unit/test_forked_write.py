"""The process that writes a checkpoint while training goes on: how it ends, and with whom."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from megatron_dapo.checkpointing.pending_save import PendingSave
from megatron_dapo.common.errors import JobError
from megatron_dapo.platform.agreement import SingleRank, describe
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def in_background(write: Callable[[], list]) -> tuple[PendingSave, list]:
    """A save by a forked process, and the place of its results at the finish."""
    results: list = []
    return PendingSave(SingleRank(), Path("folder"), write, results.extend, background=True), results


def result_of(write: Callable[[], list]) -> list:
    pending, results = in_background(write)
    pending.finish()
    return results


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return met


def test_result_is_what_was_written_when_the_process_began():
    values = [1, 2]
    pending, results = in_background(lambda: time.sleep(0.2) or list(values))
    values.append(3)
    assert not pending.is_done()
    pending.finish()
    assert results == [1, 2]
    pending.finish()
    assert results == [1, 2]


def test_its_error_is_told_in_the_systems_words():
    def full():
        raise OSError(28, "No space left on device", "/checkpoints/f")

    pending, results = in_background(full)
    assert until(pending.is_done)
    for _ in range(2):  # again when it is asked again
        with pytest.raises(JobError, match="No space left on device: '/checkpoints/f'"):
            pending.finish()
    assert not results


def test_killed_writer_is_an_error():
    pending, _ = in_background(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert until(pending.is_done)
    with pytest.raises(JobError, match="exit code -9"):
        pending.finish()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_schedulers_signal_does_not_stop_it(number):
    assert result_of(lambda: os.kill(os.getpid(), number) or ["written"]) == ["written"]


def _trainer(sender) -> None:
    pending, _ = in_background(lambda: time.sleep(60))
    sender.send(psutil.Process().children()[0].pid)
    pending.finish()


def test_it_ends_with_a_killed_trainer():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    trainer = context.Process(target=_trainer, args=(sender,))
    trainer.start()
    writer = psutil.Process(receiver.recv())
    trainer.kill()
    trainer.join()
    assert until(lambda: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE)


# a program of its own, since the end of a process that multiprocessing started runs other handlers
FAILING_TRAINER = """
import os, time
from pathlib import Path
import psutil
from megatron_dapo.checkpointing.pending_save import PendingSave
from megatron_dapo.platform.agreement import SingleRank
begun, says = os.pipe()
write = lambda: os.write(says, b"x") and time.sleep(3600)
pending = PendingSave(SingleRank(), Path("folder"), write, complete=list, background=True)
os.read(begun, 1)
print(psutil.Process().children()[0].pid, flush=True)
raise RuntimeError("out of memory, say")
"""


def test_a_trainer_that_fails_does_not_wait_at_its_end_for_a_write_that_hangs():
    trainer = subprocess.Popen([sys.executable, "-c", FAILING_TRAINER], cwd=REPOSITORY, stdout=subprocess.PIPE)
    try:
        writer = psutil.Process(int(trainer.stdout.readline()))
        assert trainer.wait(60) == 1
        assert until(lambda: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE)
    finally:
        trainer.kill()
        trainer.communicate()


def test_that_no_process_can_be_started_is_told_as_a_write_that_failed(monkeypatch):
    """Not raised at once: the other ranks would wait for this one."""

    def no_memory() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", no_memory)
    pending, _ = in_background(list)
    assert pending.is_done()
    with pytest.raises(JobError, match=r"no process can be started to write \(.*Cannot allocate memory\)"):
        pending.finish()


def _trainer_of_two_threads(sender) -> None:
    torch.set_num_threads(2)
    values = torch.ones(2**20)
    values.add_(1)  # a loop of this size makes OpenMP's team of two
    sender.send(result_of(lambda: values.clone()[:2].tolist()))


def test_a_trainer_with_several_threads_has_a_writer_that_ends():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    trainer = context.Process(target=_trainer_of_two_threads, args=(sender,))
    trainer.start()
    try:
        assert receiver.poll(10), "the writer did not end in 10 s"
        assert receiver.recv() == [2, 2]
    finally:
        trainer.kill()
        trainer.join()


def test_full_disk_is_called_a_full_disk():
    """torch raises this, about its own positions in the file,
    during the handling of the system's error."""
    with pytest.raises(RuntimeError) as caught:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904
    assert describe(caught.value) == "[Errno 28] No space left on device"
    assert describe(ValueError("a\n b")) == "ValueError: a b"
