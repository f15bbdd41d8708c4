"""A child that must not outlive its parent, though it hears nothing of the parent's kill."""

import os
import select
import signal
import subprocess
import sys
from typing import TextIO

import pytest

from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def is_closed(pipe: TextIO) -> bool:
    """Within a third of a child's time to go on: whether all holders of the pipe are gone."""
    return bool(select.select([pipe], [], [], 20)[0]) and pipe.read() == ""


WATCHED_PARENT = """
import subprocess, sys, threading
child = "from megatron_dapo.common.parent_death import watch_parent; watch_parent(0.05); print('runs', flush=True); "
command = [sys.executable, "-c", child + "import time; time.sleep(60)"]
started = []
starter = threading.Thread(target=lambda: started.append(subprocess.Popen(command, start_new_session=True)))
starter.start()
starter.join()
started[0].wait()
"""


def test_a_child_that_a_thread_started_goes_on_without_the_thread_and_ends_with_the_process():
    with subprocess.Popen([sys.executable, "-c", WATCHED_PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "runs\n"
        parent.send_signal(signal.SIGKILL)
        assert is_closed(parent.stdout)
        assert parent.wait(5) == -signal.SIGKILL


PARENT = """
import os, subprocess, sys
from functools import partial
from megatron_dapo.common.parent_death import end_with_parent
child = "print('runs', flush=True); import time; time.sleep(60)"
command = [sys.executable, "-Sc", child]
subprocess.run(command, start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()))
"""


def test_a_child_is_killed_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "runs\n"
        parent.send_signal(signal.SIGKILL)
        assert is_closed(parent.stdout)
        assert parent.wait(5) == -signal.SIGKILL


RANK = """
import time
from megatron_dapo import __main__ as program
program._checked_config = lambda *_: (print("runs", flush=True), time.sleep(60))
program.main(["train"])
"""
AGENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}], start_new_session=True)"


def test_a_rank_under_torchrun_is_killed_with_it():
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "any"}
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
    ) as agent:
        assert agent.stdout.readline() == "runs\n"
        agent.send_signal(signal.SIGKILL)
        assert is_closed(agent.stdout)


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    orphan = "from megatron_dapo.common.parent_death import end_with_parent; end_with_parent(1 << 30); print('goes on')"
    done = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
