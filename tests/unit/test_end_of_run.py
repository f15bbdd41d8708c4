"""Writes go on between the parts of a step; after the last one they are waited for,
before the model."""

import pickle
import signal
import time
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from megatron_dapo import trainer
from megatron_dapo.checkpointing.folders import newest_first
from megatron_dapo.checkpointing.saver import Saver
from megatron_dapo.checkpointing.stop import StopRequest
from megatron_dapo.common.errors import JobError, RunStopped, SharedUserError, UserError
from megatron_dapo.common.rollout_errors import ForeignSamples, Interrupted, RolloutError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.run import TrainerConfig
from megatron_dapo.job import Job
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.telemetry.telemetry import NullTelemetry
from tests.checkpoint_run import SlowWrite, trainer_state

pytestmark = pytest.mark.unit


class Checkpoints:
    """Of a finished run, as `restore` tells."""

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


def placement_of(done: list[str]) -> SimpleNamespace:
    """On GPUs of its own, the trainer always has them; on shared ones it must get them back first."""
    return SimpleNamespace(saves_first=False, to_trainer=lambda: done.append("to trainer"))


def job_of(checkpoints: Checkpoints | Saver) -> SimpleNamespace:
    """A job as far as these tests ask."""
    save_model = lambda: checkpoints.done.append("model")  # noqa: E731
    job = SimpleNamespace(checkpoints=checkpoints, telemetry=NullTelemetry(), _save_model=save_model)
    job.placement = placement_of([])
    job.finish = lambda: Job.finish(job)
    job.has_validated, job.finish_validation = lambda step: True, lambda: None
    job.wait_for_rollout, job.push_weights = nullcontext, lambda version: None
    return job


class Rescuer:
    """Of a run in the middle of a step, which was asked to stop or not."""

    def __init__(self, is_asked_to_stop: bool) -> None:
        self._is_asked_to_stop, self.rescued = is_asked_to_stop, []

    def rescue(self, step: int, num_steps: int, was_handed: bool) -> bool:
        self.rescued.append(f"step {step}, {num_steps} optimizer steps")
        return self._is_asked_to_stop and not was_handed


@pytest.mark.parametrize("error", [UserError("exhausted"), RolloutError("no server is left"), Interrupted("asked")])
@pytest.mark.parametrize("is_asked_to_stop", [False, True])
def test_whatever_ends_a_step_the_one_before_is_saved_first(error, is_asked_to_stop, capfd):
    """If the run was asked to stop, it ends as asked; other failures are told."""
    checkpoints = Rescuer(is_asked_to_stop)
    placement = placement_of(checkpoints.rescued)
    job = SimpleNamespace(checkpoints=checkpoints, telemetry=NullTelemetry(), layout=SingleRank(), placement=placement)
    with pytest.raises(RunStopped if is_asked_to_stop else type(error)):
        with Job._saved_if_lost(job, 4, 2):
            raise error
    assert checkpoints.rescued == ["to trainer", "step 4, 2 optimizer steps"]
    assert (str(error) in capfd.readouterr().out) == (is_asked_to_stop and not isinstance(error, Interrupted))


def test_a_refused_batch_is_given_back_before_the_step_before_it_is_saved():
    """Otherwise the checkpoint would hold a rollout one step ahead of it, and the batch's prompts
    would be lost. The bad row, the third, is the second trajectory's: the first one has two."""
    done = []
    first, second = (
        SimpleNamespace(servers=(f"http://{name}:1",), branches=range(k)) for name, k in (("a", 2), ("b", 1))
    )
    job = SimpleNamespace(
        _rollout=SimpleNamespace(refuse_batch=lambda: done.append("refused")),
        checkpoints=SimpleNamespace(rescue=lambda step, *_: done.append(f"step {step} saved")),
        policy=SimpleNamespace(mismatch_by_sample=lambda batches, weight_version: {2: (9.0, 1)}),
        layout=SimpleNamespace(rank=0, agreement=SingleRank()),
        telemetry=NullTelemetry(),
        placement=placement_of(done),
        _max_mismatch=0.5,
        _groups=[SimpleNamespace(samples=[first, second])],
    )
    job._saved_if_lost = lambda step: Job._saved_if_lost(job, step)
    shard = SimpleNamespace(mini_batches=[])
    Job._refuse_foreign(job, 7, shard, 0.1)
    assert not done
    with pytest.raises(ForeignSamples, match="step 7.* \\(http://b:1 by 9\\)"):
        Job._refuse_foreign(job, 7, shard, 9.0)
    assert done == ["refused", "to trainer", "step 6 saved"]


def test_a_mistake_that_rank_0_finds_in_the_rollout_is_that_of_all_ranks():
    """So that all of them save the last step."""

    def question(rollout):
        raise UserError(["one", "two"], "Traceback")

    job = SimpleNamespace(_rollout=object(), layout=SimpleNamespace(agreement=SingleRank()))
    with pytest.raises(SharedUserError) as caught:
        Job._ask_rollout(job, 1, question)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, SharedUserError) and again.sentences == ["one", "two"] and again.details == "Traceback"


def test_a_checkpoint_has_its_name_before_the_next_step_ends(tmp_path):
    """Its tensors are ready after the rollout, its checksums after the log-probs."""
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, b"x" * 32, pause_s=0)], TrainerConfig())
    job = job_of(saver)
    job.distributor, job.config = lambda step, groups: None, load_config(None, ["trainer.critic_warmup=9"])
    job._poll_save = lambda: Job._poll_save(job)
    saver.start(tmp_path / "step_000001", trainer_state(1), dict)
    while not saver._saving.tensors[0].is_done():
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
    """There may be no checkpoint to go on from:
    with save_interval -1 the run leaves only the model."""
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


@pytest.mark.parametrize("failing", ["finish_validation", "push_weights"])
def test_a_step_with_updated_weights_is_reported_even_if_a_later_phase_fails(monkeypatch, failing):
    """The validation beside it, or the push of its weights. It may be saved as done: nobody trains
    it again then."""
    logged = []
    config = load_config(None, ["trainer.total_training_steps=3"])
    job = SimpleNamespace(
        checkpoints=Checkpointless(), telemetry=SimpleNamespace(log=lambda *record: logged.append(record)),
        next_batch=lambda step: (["group"], {"rollout/a": 1.0}), distribute=lambda step, groups: "shard",
        score=lambda step, shard: (shard, {"score/b": 2.0}), update_critic=lambda shard: {"critic/c": 3.0},
        update_policy=lambda step, shard: {"actor/d": 4.0}, push_weights=lambda version: {},
        wait_for_rollout=nullcontext, has_validated=lambda step: True, finish_validation=lambda: None,
        begin_training=lambda: None, save_before_push=lambda step, metrics: None,
    )  # fmt: skip
    job.logged_if_lost = lambda *step: Job.logged_if_lost(job, *step)

    def fail(version: int = 1) -> None:
        if version:  # the push before the first step is well
            raise RolloutError("no server is left")

    setattr(job, failing, fail)
    monkeypatch.setattr(trainer, "running_job", lambda _: nullcontext(job))
    with pytest.raises(RolloutError, match="no server is left"):
        trainer.train(config)
    assert logged == [(1, {"rollout/a": 1.0, "score/b": 2.0, "critic/c": 3.0, "actor/d": 4.0}, ["group"])]


class Checkpointless(nullcontext):
    """Of a run that begins."""

    def restore(self) -> int:
        return 0
