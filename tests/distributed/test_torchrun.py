"""`launch.torchrun`: torchrun hides signals and exit codes from ranks and caller;
here they arrive."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers import REPOSITORY

pytestmark = pytest.mark.distributed

RANK = """
import os, signal, sys, time
received = []
signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
while not received:
    time.sleep(0.02)
sys.exit(85)  # what the trainer does when everything is saved
"""


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*command, *arguments], cwd=REPOSITORY, **pipes)


def test_a_signal_reaches_the_ranks_and_their_exit_code_comes_back(tmp_path):
    script, ready = tmp_path / "rank.py", tmp_path / "ready"
    script.write_text(RANK)
    ready.mkdir()
    with start(str(script), str(ready)) as launcher:
        deadline = time.monotonic() + 120
        while len(list(ready.iterdir())) < 2 and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children()
        launcher.send_signal(signal.SIGUSR1)
        _, error = launcher.communicate(timeout=60)
    assert launcher.returncode == 85, error
    assert "Traceback" not in error and len(ranks) == 2 and not any(rank.is_running() for rank in ranks)


def test_a_mistake_of_the_user_is_one_sentence_and_exit_code_2(tmp_path):
    arguments = ("-m", "megatron_dapo", "train", "trainer.sed=1", f"trainer.run_dir={tmp_path}/run")
    with start(*arguments) as launcher:
        _, error = launcher.communicate(timeout=120)
    assert launcher.returncode == 2
    assert "trainer.seed" in error and "Traceback" not in error and not (tmp_path / "run").exists()
