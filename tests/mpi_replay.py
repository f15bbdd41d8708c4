"""The demo's config on batches made beforehand, under one launcher or another:
for tests of launchers."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.data.samples import RolloutBatch
from megatron_dapo.rollout.batch_files import write_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests.helpers import REPOSITORY
from tests.synthetic import synthetic_groups

NUM_STEPS = 2
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def write_batches(folder: Path) -> Path:
    """Batches of the demo's sizes: 16 groups x 8, a vocabulary of 64."""
    for step in range(1, NUM_STEPS + 1):
        groups = synthetic_groups(64, num_groups=16, n=8, max_prompt=8, max_response=40, seed=step)
        write_batch(folder, step, RolloutBatch(tuple(groups), {}))
    return folder


def arguments(batches: Path, run: Path, *overrides: str) -> list[str]:
    """Of the trainer. Made-up log-probs are no model's: they would be refused."""
    settings = ["algorithm.rollout_correction.max_mismatch=null"]
    settings += [f"trainer.run_dir={run}", f"trainer.total_training_steps={NUM_STEPS}", "trainer.logger=[jsonl]"]
    return ["--config", str(REPOSITORY / "configs" / "demo.yaml"), "--replay", str(batches), *settings, *overrides]


def run(command: Sequence[str | Path], timeout_s: float = 240) -> subprocess.CompletedProcess:
    """From the repository, with no other launcher's variables."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout_s)


def torchrun(nproc: int, *trainer_arguments: str) -> subprocess.CompletedProcess:
    launcher = ["-m", "launch.torchrun", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc}"]
    return run([sys.executable, *launcher, "-m", "megatron_dapo", "train", *trainer_arguments])


def metrics_of(run_dir: Path) -> list[dict]:
    """By step, but for the seconds that things took."""
    lines = [json.loads(line) for line in RunFolder(run_dir).metrics.read_text().splitlines()]
    return [{name: x for name, x in line.items() if name.split("/")[0] not in ("time", "perf")} for line in lines]


def model_of(run_dir: Path) -> bytes:
    return (RunFolder(run_dir).model / "model.safetensors").read_bytes()
