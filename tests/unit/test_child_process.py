"""When the call returns, a stopped program has died, with all its children."""

import sys
import threading
import time

import psutil
import pytest

from megatron_dapo.servers.child_process import ChildProcess
from tests.unit.test_launch import is_alive

pytestmark = pytest.mark.unit

WITH_A_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("up", flush=True)
time.sleep(60)
"""


def test_what_is_killed_is_dead_when_stop_returns(tmp_path, monkeypatch):
    """Even with every core busy, so that a process takes a while to die."""
    kill = psutil.Process.kill
    child = ChildProcess("program", [sys.executable, "-c", WITH_A_CHILD], tmp_path / "log")
    deadline = time.monotonic() + 60
    while "up" not in child.log_tail() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.poll()
    family = [psutil.Process(pid) for pid in child.pids()]
    assert len(family) == 2
    monkeypatch.setattr(psutil.Process, "kill", lambda process: threading.Timer(0.3, kill, (process,)).start())
    child.stop(grace_s=20.0)
    assert not [process for process in family if is_alive(process)]


def test_the_end_of_a_program_is_told_in_its_own_words_and_not_in_those_of_earlier_tries(tmp_path):
    log = tmp_path / "log"
    log.write_text("a mistake that is cured\n")
    child = ChildProcess("program", [sys.executable, "-c", "import sys; sys.exit('this mistake')"], log)
    assert child.wait(60) == 1
    assert child.describe_end().splitlines()[1:] == ["  | this mistake"]
    assert log.read_text() == "a mistake that is cured\nthis mistake\n"
    silent = ChildProcess("program", [sys.executable, "-c", "import os; os._exit(1)"], log)
    assert silent.wait(60) == 1 and silent.log_tail() == ""
