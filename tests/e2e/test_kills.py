"""kill -9 of the trainer at random moments: the next one finds the newest complete checkpoint."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dapo.checkpointing.folders import newest_first, read_trainer_state
from megatron_dapo.checkpointing.manifest import verify
from megatron_dapo.checkpointing.run_lock import RunLock
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder, batch_file
from tests.helpers import REPOSITORY
from tests.proofs import amount
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_KILLS, NUM_RANKS, NUM_STEPS = amount(5, 30), 2, 1000


@pytest.fixture
def config(tmp_path) -> Config:
    """A checkpoint after every step, written while the next one is trained."""
    for step in range(1, NUM_STEPS + 1):
        batch_file(tmp_path / "batches", step).parent.mkdir(exist_ok=True)
        # stands for a dumped batch: the scripted rollout reads none
        batch_file(tmp_path / "batches", step).touch()
    return load_and_validate(
        None,
        [
            f"actor_rollout_ref.model.path={make_tiny(tmp_path / 'model', 'qwen2', layers=2)}",
            f"trainer.replay={tmp_path / 'batches'}",
            f"trainer.run_dir={tmp_path / 'run'}",
            f"trainer.total_training_steps={NUM_STEPS}",
            f"trainer.n_procs_per_node={NUM_RANKS}",
            "algorithm.rollout_correction.max_mismatch=null",  # made-up log-probs are no model's
            "trainer.save_interval=1",
            "trainer.keep_last=3",
            "trainer.logger=[jsonl]",
            "data.max_prompt_length=16",
            "data.max_response_length=32",
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        ],
    )


def test_after_each_kill_the_next_trainer_goes_on_from_the_newest_complete_checkpoint(config, tmp_path):
    """One rank or both, around and during saves. The moments are drawn with a fixed seed and
    counted in saves: their number is the same on a busy machine."""
    run, moments = RunFolder(tmp_path / "run"), random.Random(3)
    newest, num_during_a_save = 0, 0
    with nursery(config, tmp_path) as tell:
        for number in range(NUM_KILLS):
            tell("start")
            reached = newest + moments.randrange(1, 3)
            wait_until(lambda reached=reached: newest_step(run) >= reached)
            assert resumed_after(run) == ([newest] if number else []), "it did not go on from the newest checkpoint"
            with pytest.raises(UserError, match="an active run"):
                RunLock(run.lock).acquire(patience_s=0)
            time.sleep(moments.uniform(0.0, 0.3))
            tell(f"kill {moments.choice(['0', '1', '0 1'])}")
            time.sleep(moments.choice([0.0, 0.1]))
            tell("end")
            complete = newest_first(run.checkpoints)
            assert complete and all(verify(folder).is_whole for folder in complete)
            num_during_a_save += any(path.name.startswith(".") for path in run.checkpoints.iterdir())
            newest = newest_step(run)
            assert read_trainer_state(complete[0])["step"] == newest
            run.log("checkpoints").unlink(missing_ok=True)
    assert newest >= NUM_KILLS
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= newest
    assert num_during_a_save >= amount(1, 10), "the kills hardly hit a save: the test shows nothing"


@contextmanager
def nursery(config: Config, folder: Path) -> Iterator[Callable[[str], None]]:
    """A function that takes a command; see trainer_nursery."""
    (folder / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "tests.e2e.trainer_nursery", str(folder / "config.yaml"), str(folder / "log")]
    process = subprocess.Popen(
        [*command, str(NUM_RANKS)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def tell(command: str) -> None:
        process.stdin.write(f"{command}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    with process:  # the end of its input ends it, and it its trainers
        yield tell


def newest_step(run: RunFolder) -> int:
    return max((int(folder.name[5:]) for folder in newest_first(run.checkpoints)), default=0)


def resumed_after(run: RunFolder) -> list[int]:
    lines = run.log("checkpoints").read_text().splitlines() if run.log("checkpoints").exists() else []
    return [int(line.split()[3]) for line in lines if line.startswith("Resumed after step")]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
