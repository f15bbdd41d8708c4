"""A child that must not outlive its parent, of which it hears nothing when that is killed."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

PARENT = """
import os, subprocess, sys
from functools import partial
from megatron_dapo.parent_death import end_with_parent
child = "print('runs', flush=True); import time; time.sleep(60)"
command = [sys.executable, "-Sc", child]
subprocess.run(command, start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()))
"""


def test_a_child_is_killed_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "runs\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == "", "the end of the pipe that both had, and not a minute later"
        assert parent.wait(5) == -signal.SIGKILL


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    orphan = "from megatron_dapo.parent_death import end_with_parent; end_with_parent(1 << 30); print('goes on')"
    done = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
