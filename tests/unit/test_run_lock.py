"""One run in a run folder at a time, and a vanished one keeps nobody out."""

import subprocess
import sys
from contextlib import contextmanager

import pytest

from megatron_dapo.checkpointing.run_lock import RunLock
from megatron_dapo.common.errors import UserError

pytestmark = pytest.mark.unit

HOLDER = """
import pathlib, subprocess, sys
from megatron_dapo.checkpointing.run_lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
lock.acquire()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path):
    """By a process that has a child, until the block ends it with kill -9."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            subprocess.run(["kill", str(child)], check=True)


def test_a_second_run_is_refused_by_name_and_a_killed_one_is_no_obstacle(tmp_path):
    path = tmp_path / "run" / ".lock"
    with held(path) as process:
        with pytest.raises(UserError, match=f"an active run .process {process.pid} on .*trainer.run_dir"):
            RunLock(path).acquire(patience_s=0)
        process.kill()
        process.wait()
        lock = RunLock(path)
        lock.acquire(patience_s=0)  # its child lives on
        lock.release()


def test_a_run_waits_for_another_about_to_end(tmp_path, monkeypatch):
    path, lock = tmp_path / ".lock", RunLock(tmp_path / ".lock")
    waited = []
    with held(path) as process:

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            process.kill()
            process.wait()

        monkeypatch.setattr("megatron_dapo.checkpointing.run_lock.time.sleep", sleep)
        lock.acquire(patience_s=30)
        assert len(waited) == 1
        lock.acquire(patience_s=0)  # its own is no obstacle
    lock.release()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be written .Not a directory.; choose another trainer.run_dir"):
        RunLock(tmp_path / "file" / "run" / ".lock").acquire()


def test_where_storage_knows_no_locks_the_run_goes_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("megatron_dapo.storage.file_lock.fcntl.lockf", refuse)
    RunLock(tmp_path / ".lock").acquire()
