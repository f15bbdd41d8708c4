"""Resume: the newest whole checkpoint after any kill, changed configs named, no silent loss."""

import multiprocessing
import os
import random
import signal
import time

import pytest

from megatron_dapo.checkpointing.config_changes import config_changes, config_hash, config_to_plain, matters
from megatron_dapo.checkpointing.folders import CONTROLLER_STATE, newest_first, remove_leftovers
from megatron_dapo.checkpointing.manifest import verify, write_manifest
from megatron_dapo.checkpointing.resume import CONTENTS, Start, not_kept, report_lines
from megatron_dapo.checkpointing.resume import find_start as find_start_of
from megatron_dapo.checkpointing.rollout_state import restore_rollout
from megatron_dapo.checkpointing.saver import Saver
from megatron_dapo.checkpointing.stop import StopRequest
from megatron_dapo.common.ends import EndFolder
from megatron_dapo.common.errors import JobError, UserError
from megatron_dapo.common.signals import StopSignals
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.run import TrainerConfig
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.rollout.batch_replay import BatchReplay
from tests.checkpoint_run import SlowWrite, run, trainer_state

pytestmark = pytest.mark.unit

NUM_KILLS = 12
LR = "actor_rollout_ref.actor.optim.lr"


def config(*overrides: str) -> Config:
    return load_config(None, list(overrides))


def find_start(root, config: Config) -> Start:
    return find_start_of(root, config, SingleRank())


def save(root, step: int, **options) -> None:
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, b"x" * 32, pause_s=0, **options)], TrainerConfig())
    saver.start(root / f"step_{step:06d}", trainer_state(step), dict)
    saver.finish()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    save(root, 4)
    save(root, 6)
    return root


@pytest.fixture
def damaged(tmp_path):
    """Steps 2 to 4, of which 3 and 4 are damaged."""
    for step in (2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step_000004" / "megatron" / "__3_0.distcp").unlink()
    with (tmp_path / "step_000003" / "megatron" / "__1_0.distcp").open("r+b") as file:
        file.write(b"y")
    return tmp_path


# ------------------------------------------------------------------------------------------ kill -9


def test_after_a_kill_at_any_moment_the_run_goes_on_from_its_newest_whole_checkpoint(tmp_path):
    """Processes that write checkpoints all the time, killed at random moments;
    the trainer itself in tests/e2e/test_kills.py."""
    root, log, moments = tmp_path / "checkpoints", tmp_path / "log", random.Random(7)
    root.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.checkpoint_run"])
    saved, num_in_a_save, known = 0, 0, 0
    for _ in range(NUM_KILLS):
        process = context.Process(target=run, args=(root, log))
        process.start()
        resumed = int(wait_for_line(log, known).removeprefix("resumed "))
        wait_for_line(log, known + moments.randrange(4))  # a moment of the run, however busy the machine is
        time.sleep(moments.uniform(0.0, 0.02))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        lines = log.read_text().splitlines()
        assert resumed >= saved, f"step {saved} was saved, the next process resumed after {resumed}"
        known, saved = len(lines), max([int(line.split()[1]) for line in lines if line.startswith("saved")], default=0)
        assert all(verify(folder).is_whole for folder in newest_first(root))
        num_in_a_save += any(path.name.startswith(".") for path in root.iterdir())
    assert find_start(root, config()).step >= saved >= NUM_KILLS // 2
    assert num_in_a_save >= NUM_KILLS // 3, "the kills hardly hit a save: the test shows nothing"
    assert len([folder for folder in newest_first(root) if int(folder.name[5:]) % 50]) <= 3


def wait_for_line(log, number: int) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) > number:
            return lines[number]
        time.sleep(0.002)
    raise AssertionError("the process does not go on")


# --------------------------------------------------------------------------------------- the choice


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_skipped_by_name(damaged):
    start = find_start(damaged, config())
    assert start.folder == damaged / "step_000002" and start.step == 2
    assert start.notes == (
        "skipped step_000004: megatron/__3_0.distcp is missing",
        "skipped step_000003: megatron/__1_0.distcp has another content than was written (its sha256 differs)",
    )
    lines = report_lines(start, ["model"], ["rng: another layout"])
    assert lines[0] == f"Resumed after step 2 from {damaged / 'step_000002'}"
    assert "  not restored: rng: another layout" in lines and any("skipped step_000004" in line for line in lines)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(damaged, mode):
    (damaged / "step_000002" / "manifest.json").unlink()
    with pytest.raises(UserError) as error:
        find_start(damaged, config(f"trainer.resume={mode}"))
    for name, fault in {
        "step_000002": "manifest.json is missing",
        "step_000003": "sha256",
        "step_000004": "__3_0",
    }.items():
        assert any(sentence.startswith(name) and fault in sentence for sentence in error.value.sentences)


def test_without_any_checkpoint_auto_begins_and_required_refuses(tmp_path):
    (tmp_path / ".staging_step_000001").mkdir()
    for root in (tmp_path, tmp_path / "nowhere"):
        assert find_start(root, config()).step == 0 and find_start(root, config()).folder is None
        with pytest.raises(UserError, match="trainer.resume is required, but .* holds no checkpoint"):
            find_start(root, config("trainer.resume=required"))


def test_never_refuses_a_folder_with_checkpoints(two, tmp_path):
    assert find_start(tmp_path, config("trainer.resume=never")).folder is None
    with pytest.raises(UserError, match="resume is never, but .*step_000006.*another trainer.run_dir"):
        find_start(two, config("trainer.resume=never"))


def test_a_missing_part_is_named_and_may_be_allowed_by_name(tmp_path):
    save(tmp_path, 5)
    folder = tmp_path / "step_000005"
    write_manifest(folder, [part for part in CONTENTS if part != "controller"])
    with pytest.raises(UserError, match=r"step_000005 has no controller .*trainer.accept_missing=\[controller\]"):
        find_start(tmp_path, config())
    assert find_start(tmp_path, config("trainer.accept_missing=[controller]")).missing == ("controller",)
    write_manifest(folder, ["model", "counters", "controller"])
    with pytest.raises(UserError, match=r"no optimizer, lr_schedule, rng .*accept_missing=\[optimizer\]"):
        find_start(tmp_path, config())
    assert "optimizer" in find_start(tmp_path, config("trainer.accept_missing=[optimizer]")).missing
    write_manifest(folder, ["model"])
    with pytest.raises(UserError, match="resume from a training checkpoint.$"):
        find_start(tmp_path, config())


def test_a_part_without_use_in_this_run_is_reported(tmp_path):
    save(tmp_path, 5)
    write_manifest(tmp_path / "step_000005", [*CONTENTS, "critic"])
    assert find_start(tmp_path, config()).unused == ("critic",)


class Rollout:
    """Keeps all it is given; takes only a state of its own prompts."""

    def __init__(self, **state) -> None:
        self.state = {"queue": {"num_drawn": 0, "kept": [], "open": []}} | state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        if state.get("prompts") != self.state.get("prompts"):
            raise UserError("the prompts are others; restore them.")
        self.state |= {name: value for name, value in state.items() if name in self.state}


def test_the_restored_rollout_holds_its_saved_state(tmp_path):
    queue = {"num_drawn": 9, "kept": ["group"], "open": []}
    cursor = ["prompt cursor (9 drawn)", "1 finished groups that wait", "0 prompts that are open"]
    pool = {"experiences": {"experiences": ["one", "two"]}}
    assert restore_rollout(Rollout(), {"queue": queue}, False) == (cursor, [])
    both = Rollout(experiences={"experiences": []})
    assert restore_rollout(both, {"queue": queue, **pool}, False) == ([*cursor, "2 experiences to replay"], [])
    assert restore_rollout(Rollout(), {"queue": queue, **pool}, False) == (
        cursor,
        ["experiences to replay: this run has none"],
    )
    halted = {"num_drawn": 9, "kept": [], "open": [{"uid": "a", "partials": [{}, {}]}, {"uid": "b"}]}
    (_, _, num_open, answers), _ = restore_rollout(Rollout(), {"queue": halted}, False)
    assert (num_open, answers) == ("2 prompts that are open", "2 unfinished answers")
    _, new = restore_rollout(Rollout(**pool), {"queue": queue}, False)
    assert new == ["experiences to replay: the checkpoint has none"]
    lost = ["prompt cursor and groups that waited: this run has none"]
    assert restore_rollout(BatchReplay(tmp_path, 64), {"queue": queue}, False) == (["the place in the replay"], lost)
    assert restore_rollout(BatchReplay(tmp_path, 64), {"replay": "elsewhere"}, False) == (
        ["the place in the replay"],
        [],
    )


def test_other_prompts_begin_anew_only_if_accepted():
    rollout, state = Rollout(prompts="mine"), {"prompts": "theirs", "queue": {"num_drawn": 9, "kept": [], "open": []}}
    with pytest.raises(UserError, match="the prompts are others"):
        restore_rollout(rollout, state, may_begin_anew=False)
    restored, (lost,) = restore_rollout(rollout, state, may_begin_anew=True)
    assert restored == [] and lost.endswith("they begin anew (accepted), since the prompts are others")
    assert rollout.state["queue"]["num_drawn"] == 0


def test_a_run_in_fp8_with_delayed_scaling_reports_its_lost_history():
    fp8 = [f"actor_rollout_ref.actor.megatron.{key}" for key in ("fp8=hybrid", "fp8_recipe=delayed")]
    (line,) = not_kept(config(*fp8))
    assert line.startswith("FP8 scaling history: no checkpoint holds it")
    assert not_kept(config(fp8[0])) == not_kept(config()) == []


# --------------------------------------------------------------------------------------- the config


def test_a_changed_key_that_matters_is_named_with_the_override_that_accepts_it(two):
    with pytest.raises(UserError) as error:
        find_start(two, config(f"{LR}=3e-5", "trainer.seed=2"))
    first, second = error.value.sentences
    assert first.startswith(f"{LR} is 3e-05, but was 1e-06 in the run that wrote step_000006")
    assert f"trainer.accept_changes=[{LR}]" in first and "trainer.accept_changes=[trainer.seed]" in second
    with pytest.raises(UserError) as error:
        find_start(two, config(f"{LR}=3e-5", "trainer.seed=2", "trainer.accept_changes=[trainer.seed]"))
    (only,) = error.value.sentences
    assert f"trainer.accept_changes=[trainer.seed, {LR}]" in only
    start = find_start(two, config(f"{LR}=3e-5", f"trainer.accept_changes=[{LR}]"))
    assert f"changed {LR} 1e-06 -> 3e-05 (accepted)" in start.notes


def test_layout_servers_and_the_length_of_the_run_may_change_and_are_reported(two):
    tp = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    start = find_start(two, config(f"{tp}=2", "trainer.n_procs_per_node=2", "trainer.total_training_steps=500"))
    assert f"changed {tp} 1 -> 2" in start.notes and "changed trainer.total_training_steps 100 -> 500" in start.notes


@pytest.mark.parametrize(
    "cure",
    [
        "reward.max_error_share=1.0",
        "reward.timeout_s=60.0",
        "reward.pass_env=[JUDGE_KEY]",
        "algorithm.rollout_correction.max_mismatch=0.8",
    ],
)
def test_the_cure_of_a_run_that_stopped_itself_may_change_at_its_resume(cure):
    (change,) = config_changes(config_to_plain(config()), config(cure))
    assert not matters(change, config())


def test_the_length_of_the_run_matters_if_the_learning_rate_decays_over_it():
    decaying = "actor_rollout_ref.actor.optim.lr_decay_style=cosine"
    (change,) = config_changes(config_to_plain(config(decaying)), config(decaying, "trainer.total_training_steps=7"))
    assert matters(change, config(decaying)) and not matters(change, config())


def test_a_switch_left_to_its_coefficient_is_compared_by_its_meaning():
    switch, coefficient = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef=0.1"
    assert config_changes(config_to_plain(config(f"{switch}=false")), config()) == []
    assert config_changes(config_to_plain(config(f"{switch}=true", coefficient)), config(coefficient)) == []
    changes = config_changes(config_to_plain(config()), config(coefficient))
    assert {change.key for change in changes} == {switch, "algorithm.kl_ctrl.kl_coef"}


def test_a_key_that_only_one_of_the_programs_has(two):
    before = config_to_plain(config())
    del before["trainer"]["seed"]
    assert config_changes(before, config()) == []  # new in this program, at its default
    (change,) = config_changes(before, config("trainer.seed=3"))
    assert str(change) == "trainer.seed not there -> 3"
    before = config_to_plain(config()) | {"critic": {"lr": 1e-5}}
    (change,) = config_changes(before, config())
    assert str(change) == "critic.lr 1e-05 -> not there" and matters(change, config())


def test_a_key_with_names_of_the_users_own_is_one_value():
    """Any key with a mapping as its default."""
    keys = [name for name, key in known_keys().items() if isinstance(key.default, dict)]
    assert len(keys) > 1
    for key in keys:
        (change,) = config_changes(config_to_plain(config()), config(f"{key}={{one: 1}}"))
        assert str(change) == f'{key} {{}} -> {{"one": 1}}' and matters(change, config())


def test_a_removed_key_may_change_like_its_section():
    before = config_to_plain(config())
    before["weight_sync"]["gone"] = before["actor_rollout_ref"]["rollout"]["server"]["gone"] = 1
    before["algorithm"]["gone"] = 1
    changes = {change.key: matters(change, config()) for change in config_changes(before, config())}
    assert changes == {
        "weight_sync.gone": False, "actor_rollout_ref.rollout.server.gone": False, "algorithm.gone": True,
    }  # fmt: skip


def test_equal_configs_have_one_hash_and_others_another():
    assert config_hash(config()) == config_hash(config("trainer.seed=1")) != config_hash(config("trainer.seed=2"))


# ------------------------------------------------------------------------------------------ writing


def test_a_second_save_waits_for_the_first(tmp_path):
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, b"x" * 32, pause_s=0.002)], TrainerConfig())
    saver.start(tmp_path / "step_000001", trainer_state(1), dict)
    assert newest_first(tmp_path) == []
    saver.start(tmp_path / "step_000002", trainer_state(2), dict)
    assert [folder.name for folder in newest_first(tmp_path)] == ["step_000001"]
    deadline = time.monotonic() + 10
    while len(newest_first(tmp_path)) < 2 and time.monotonic() < deadline:
        saver.poll()
    assert [folder.name for folder in newest_first(tmp_path)] == ["step_000002", "step_000001"]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files, then the names of files, then the manifest, then the rename, and the rename itself.
    After a power cut a folder with a checkpoint's name is whole."""
    calls, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        calls.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(old, new, **options) -> None:
        calls.append(("name", str(new)))
        rename(old, new, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    save(tmp_path, 1)
    named = calls.index(("name", str(tmp_path / "step_000001")))
    staged = str(tmp_path / ".staging_step_000001")
    manifest = next(i for i, (what, path) in enumerate(calls) if what == "flush" and "manifest.json" in path)
    before, between = (
        {path for what, path in part if what == "flush"} for part in (calls[:manifest], calls[manifest:named])
    )
    names = ("trainer.json", CONTROLLER_STATE, *(f"megatron/__{number}_0.distcp" for number in range(5)))
    assert {staged, f"{staged}/megatron", *(f"{staged}/{name}" for name in names)} <= before
    assert staged in between  # the manifest's own name
    assert ("flush", str(tmp_path)) in calls[named:]


@pytest.mark.parametrize("how", ["poll", "finish", "start"])
def test_a_write_that_failed_is_an_error_at_the_next_step_and_leaves_nothing(tmp_path, how):
    save(tmp_path, 1)
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, b"x" * 32, pause_s=0, fails=True)], TrainerConfig())
    saver.start(tmp_path / "step_000002", trainer_state(2), dict)
    time.sleep(0.05)
    with pytest.raises(OSError, match="no space left"):
        saver.start(tmp_path / "step_000003", trainer_state(3), dict) if how == "start" else getattr(saver, how)()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    saver.finish()


def test_a_state_that_cannot_be_written_is_an_error_that_names_the_checkpoint(tmp_path):
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, b"x" * 32)], TrainerConfig())
    with pytest.raises(JobError, match="step_000002 failed; rank 0 on .*: TypeError: .*bytes"):
        saver.start(tmp_path / "step_000002", trainer_state(2), lambda: {"extra_info": b"bytes"})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_of_a_write_that_failed_does_not_hide_why_it_failed(tmp_path, monkeypatch):
    """Another process may still write into the folder: the next start deletes it."""

    def not_empty(folder) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr("megatron_dapo.checkpointing.saver.discard", not_empty)
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, b"x" * 32, pause_s=0, fails=True)], TrainerConfig())
    saver.start(tmp_path / "step_000002", trainer_state(2), dict)
    with pytest.raises(OSError, match="no space left"):
        saver.finish()
    assert remove_leftovers(tmp_path) == [".staging_step_000002"]


class ThreeRanks(SingleRank):
    """The values of the first and the last are given."""

    def __init__(self, first, last) -> None:
        super().__init__()
        self.rank = 1
        self._others = first, last

    def gather(self, value):
        return [self._others[0], value, self._others[1]]


# ----------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_remembered_until_the_step_ends(tmp_path, number):
    before = signal.getsignal(number)
    with StopRequest(tmp_path / "stop", SingleRank()) as stop:
        assert stop.received() is None
        os.kill(os.getpid(), number)
        assert stop.received() == number.name
    assert signal.getsignal(number) == before


def test_a_launchers_sigterm_is_reported_as_its_users_action(tmp_path, monkeypatch):
    ends = EndFolder(tmp_path, start="now")
    for name, value in ends.variables().items():
        monkeypatch.setenv(name, value)

    def reason_of(number: signal.Signals) -> str | None:
        with StopRequest(tmp_path / "stop", SingleRank()) as stop:
            os.kill(os.getpid(), number)
            return stop.received()

    assert reason_of(signal.SIGTERM) == "SIGTERM"  # somebody's own
    EndFolder(tmp_path, start="before").note_stop("Ctrl-C")
    assert reason_of(signal.SIGTERM) == "SIGTERM"
    ends.note_stop("Ctrl-C")
    assert reason_of(signal.SIGTERM) == "Ctrl-C" and reason_of(signal.SIGUSR1) == "SIGUSR1"
    for damaged in ("", "[]", '"Ctrl-C"', '{"start": "now"}'):
        (tmp_path / "asked_to_stop").write_text(damaged)
        assert reason_of(signal.SIGTERM) == "SIGTERM"


def end_of(stop, *numbers: signal.Signals) -> int | None:
    """Exit code of a process that enters `stop` and gets the signals, 0.1 s apart;
    None if it goes on."""
    context = multiprocessing.get_context("fork")

    def work(sender) -> None:
        with stop:
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.1)
            sender.send("lives")
            time.sleep(60)

    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender,))
    process.start()
    sender.close()
    try:
        assert receiver.poll(10)
        receiver.recv()
        return None
    except EOFError:
        process.join()
        return process.exitcode
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_sigterm_to_a_rank_that_its_launcher_passes_on_as_well_is_one_request(tmp_path, first):
    """A signal to every process of a group reaches a rank twice: it saves all the same."""
    assert end_of(StopRequest(tmp_path / "stop", SingleRank()), first, signal.SIGTERM) is None


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_a_later_sigterm_does_not_wait_for_the_end_of_the_step(tmp_path, monkeypatch, first):
    monkeypatch.setattr("megatron_dapo.checkpointing.stop.ONE_REQUEST_S", 0.05)
    assert end_of(StopRequest(tmp_path / "stop", SingleRank()), first, signal.SIGTERM) == -signal.SIGTERM


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("one_request_s", "num_received"), [(60.0, 1), (0.0, 2)])
def test_signals_at_once_are_one_request_of_a_launcher_too(one_request_s, num_received):
    """A service manager sends SIGHUP right after SIGTERM."""
    with StopSignals((signal.SIGTERM, signal.SIGHUP), one_request_s=one_request_s) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    assert (stop.received, stop.num_received) == (signal.SIGTERM, num_received)


def test_a_signal_to_any_rank_stops_all(tmp_path):
    assert StopRequest(tmp_path / "stop", ThreeRanks(None, "SIGUSR1")).received() == "SIGUSR1"


def test_a_stop_file_is_obeyed_once(tmp_path):
    stop = StopRequest(tmp_path / "stop", SingleRank())
    (tmp_path / "stop").touch()
    assert stop.received() == f"the file {tmp_path / 'stop'}"
    stop.accept()
    assert stop.received() is None
    stop.accept()
