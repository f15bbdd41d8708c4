"""The same run folder again: nothing of an earlier run is overwritten, mixed in or lost."""

import json

import pytest

from megatron_dapo.checkpointing.earlier_run import remove_later_dumps, set_aside
from megatron_dapo.checkpointing.run_checkpoints import choose_start
from megatron_dapo.checkpointing.saver import Saver
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.run import TrainerConfig
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.storage.run_folder import RunFolder, batch_file, batch_steps
from megatron_dapo.telemetry.closing_table import read_metrics
from megatron_dapo.telemetry.telemetry import Telemetry
from tests.checkpoint_run import SlowWrite, trainer_state

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path):
    """Of a run that reported three steps, with samples, batches and a model."""
    run = RunFolder(tmp_path).create()
    train(run)
    run.config.write_text("first")
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    (run.logs / "controller.log").write_text("still open")
    for step in (1, 2, 3):
        run.rollout(step).write_text("{}\n")
        batch_file(run.batches, step).parent.mkdir(exist_ok=True)
        batch_file(run.batches, step).write_text("")
        run.validation(step).parent.mkdir(exist_ok=True)
        run.validation(step).write_text("{}\n")
    return run


def train(run: RunFolder, *overrides: str, steps: int = 3) -> None:
    telemetry = Telemetry(load_config(None, list(overrides)), run)
    for step in range(1, steps + 1):
        telemetry.log(step, {"reward/mean": 0.5})
    telemetry.close()


def config(run: RunFolder, *overrides: str):
    return load_config(None, [f"trainer.run_dir={run.path}", *overrides])


def save(run: RunFolder, step: int) -> None:
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, b"x", pause_s=0)], TrainerConfig())
    saver.start(run.checkpoint(step), trainer_state(step), dict)
    saver.finish()


def test_a_run_without_a_checkpoint_is_put_aside_by_name_before_the_folders_next_one(folder, capsys):
    assert choose_start(config(folder), folder, SingleRank()).step == 0
    earlier = RunFolder(folder.path / "earlier_1")
    assert f"earlier run without a checkpoint; it is now in {earlier.path}" in capsys.readouterr().out
    train(folder.create(), steps=2)
    assert [record["step"] for record in read_metrics(earlier.metrics)] == [1, 2, 3]
    assert [record["step"] for record in map(json.loads, folder.metrics.read_text().splitlines())] == [1, 2]
    assert batch_steps(earlier.batches) == [1, 2, 3] and earlier.rollout(3).exists() and not folder.rollout(1).exists()
    assert (earlier.model / "config.json").exists() and not folder.model.exists()
    assert earlier.config.read_text() == "first" and list(earlier.tensorboard.iterdir())
    # those of this run are already there
    assert (folder.logs / "controller.log").read_text() == "still open"

    assert set_aside(folder) == folder.path / "earlier_2"
    assert set_aside(folder) is None


def test_a_folder_in_which_no_run_has_got_to_a_step_is_used_as_it_is(tmp_path, capsys):
    run = RunFolder(tmp_path).create()
    Telemetry(load_config(None, []), run).close()
    run.config.write_text("")
    assert choose_start(config(run), run, SingleRank()).step == 0
    assert not list(tmp_path.glob("earlier*")) and capsys.readouterr().out == ""
    assert set_aside(RunFolder(tmp_path / "none")) is None


def test_a_resumed_run_takes_back_the_samples_and_batches_after_its_checkpoint(folder, capsys):
    """Even if it ends before it has done those steps again: it is shorter now."""
    save(folder, 1)
    (folder.rollouts / "notes.txt").write_text("mine")
    assert choose_start(config(folder), folder, SingleRank()).step == 1
    assert batch_steps(folder.batches) == [1]
    assert sorted(path.name for path in folder.rollouts.iterdir()) == ["notes.txt", "step_000001.jsonl"]
    assert folder.validation(1).exists() and not folder.validation(2).exists()
    assert "Removed the samples and batches of steps 2 to 3, after the checkpoint" in capsys.readouterr().out
    assert folder.model.exists() and not list(folder.path.glob("earlier*"))
    assert remove_later_dumps(folder, 1) == []
