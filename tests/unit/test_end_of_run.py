"""What is being written goes on between the parts of a step; after the last one it is waited for, before the model."""

import signal
import time
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from megatron_dapo import trainer
from megatron_dapo.checkpointing import newest_first
from megatron_dapo.checkpointing.saver import Retention, Saver
from megatron_dapo.checkpointing.stop import StopRequest
from megatron_dapo.config import load_config
from megatron_dapo.job import Job
from megatron_dapo.platform import JobError, SingleRank
from megatron_dapo.telemetry import NullTelemetry
from tests.checkpoint_run import SlowWrite, trainer_state

pytestmark = pytest.mark.unit


class Checkpoints:
    """Of a run that is done: `restore` says so."""

    def __init__(self, folder, num_steps: int = 0, error: str = "") -> None:
        self._stop, self._num_steps, self._error = StopRequest(folder / "stop", SingleRank()), num_steps, error
        self.done: list[str] = []

    def restore(self) -> int:
        return self._num_steps

    def finish(self) -> None:
        self.done.append("checkpoint")
        if self._error:
            raise JobError(self._error)

    def __enter__(self) -> "Checkpoints":
        self._stop.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.__exit__()


def job_of(checkpoints: Checkpoints | Saver) -> SimpleNamespace:
    """What these tests ask of a job."""
    save_model = lambda: checkpoints.done.append("model")  # noqa: E731
    job = SimpleNamespace(checkpoints=checkpoints, telemetry=NullTelemetry(), _save_model=save_model)
    job.finish = lambda: Job.finish(job)
    job.wait_for_rollout, job.push_weights = nullcontext, lambda version: None
    return job


def test_a_checkpoint_has_its_name_before_the_next_step_ends(tmp_path):
    """Its tensors are ready after the rollout, its checksums after the log-probs."""
    saver = Saver(SingleRank(), lambda folder: SlowWrite(folder, b"x" * 32, pause_s=0), Retention())
    job = job_of(saver)
    job.distributor, job.config = lambda step, groups: None, load_config(None, ["trainer.critic_warmup=9"])
    job._carry_on_saving = lambda: Job._carry_on_saving(job)
    saver.start(tmp_path / "step_000001", trainer_state(1), dict)
    while not saver._saving.pending.is_done():
        time.sleep(0.01)
    Job.distribute(job, 2, None)
    wait([saver._saving.sealing])
    Job.update_policy(job, 2, None)
    assert newest_first(tmp_path) == [tmp_path / "step_000001"]


def test_the_checkpoint_is_finished_before_the_model_is_saved(tmp_path):
    job = job_of(Checkpoints(tmp_path))
    job.finish()
    assert job.checkpoints.done == ["checkpoint", "model"]


def test_the_model_of_a_run_is_saved_though_its_last_checkpoint_could_not_be_written(tmp_path):
    job = job_of(Checkpoints(tmp_path, error="writing step_000006 failed; rank 1: No space left on device"))
    with pytest.raises(JobError, match="rank 1: No space left"):
        job.finish()
    assert job.checkpoints.done == ["checkpoint", "model"]


def test_a_signal_while_the_model_is_saved_does_not_end_the_run(tmp_path, monkeypatch):
    """There may be no checkpoint to go on from: with save_interval -1 the model is all that the run leaves."""
    config = load_config(None, ["trainer.total_training_steps=3"])
    job = job_of(Checkpoints(tmp_path, num_steps=3))
    job._save_model = lambda: (signal.raise_signal(signal.SIGTERM), job.checkpoints.done.append("model"))

    @contextmanager
    def running_job(_):
        yield job

    monkeypatch.setattr(trainer, "running_job", running_job)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the signal ended the run"))
    try:
        assert trainer.train(config)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert job.checkpoints.done == ["checkpoint", "model"]
