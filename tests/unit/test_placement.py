"""Who has the GPUs of a run with `hybrid_engine`, on one rank, with a stand-in for the servers."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron_dapo import placement
from megatron_dapo.checkpointing.config_changes import config_changes, config_to_plain, matters
from megatron_dapo.config.loader import load_config
from megatron_dapo.placement import OwnGpus, SharedGpus, start_placement
from megatron_dapo.platform.agreement import Agreement, SingleRank
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.weight_sync.push import SyncReport
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError
from tests.unit.test_fp8_source import MIXTURE, Weights, weights_of

pytestmark = pytest.mark.unit

URL = "http://127.0.0.1:1"
NEEDED = 3 * 10**9


class World:
    """Notes what happens, in order. `kept`: bytes that the server keeps asleep; `foreign`: bytes of
    somebody else."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.kept, self.foreign = 0, 0
        self.killed: dict[str, str] = {}

    # rank 0's leader
    def sleep(self, deadline) -> None:
        self.done.append("sleep")

    def kill(self, why: dict[str, str]) -> None:
        self.killed |= why
        self.kept = 0

    def give_to_trainer(self) -> None:
        self.done.append("lease to trainer")

    # what is parked
    num_bytes = NEEDED

    def needed_bytes(self) -> int:
        return NEEDED

    def restore(self) -> None:
        self.done.append("restore")

    def park_states(self) -> None:
        self.done.append("park states")

    def park_weights(self) -> None:
        self.done.append("park weights")

    # the push
    def push(self, version: int) -> SyncReport:
        self.done.append(f"push {version}")
        return SyncReport(version, {}, 0, 0, 0, 1, 0, False, 0)

    def close(self) -> None: ...

    def free_bytes(self) -> int:
        return NEEDED + 10**9 - self.kept - self.foreign


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def shared(world, tmp_path, monkeypatch) -> SharedGpus:
    monkeypatch.setattr(Agreement, "of_all_ranks", lambda timeout_s, error: SingleRank(error))
    monkeypatch.setattr(placement, "SharedLeader", lambda *_: world)
    monkeypatch.setattr(placement, "Parked", lambda roles, **_: world)
    monkeypatch.setattr(placement, "HandlePush", lambda *_: world)
    monkeypatch.setattr(placement, "free_bytes", world.free_bytes)
    monkeypatch.setattr(placement, "FREE_S", 0.1)
    overrides = ["actor_rollout_ref.hybrid_engine=true", f"actor_rollout_ref.rollout.server_urls=[{URL}]"]
    layout = SimpleNamespace(world_size=1, rank=0)
    made = start_placement(load_config(None, overrides), layout, RunFolder(tmp_path), lambda phase: nullcontext())
    assert isinstance(made, SharedGpus)
    return made


def test_the_trainers_memory_returns_after_the_servers_sleep_and_once(shared, world):
    shared.to_trainer()
    shared.to_trainer()
    assert world.done == ["sleep", "lease to trainer", "restore"]


def test_states_are_parked_before_the_push_and_a_push_amid_sampling_begins_with_sleep(shared, world):
    shared.hold(None, [])
    shared.to_trainer()
    report = shared.push(1)
    assert report.moved_bytes == 2 * NEEDED, "the way back, and that of the states"
    world.done.clear()
    shared.push(1)
    assert world.done == ["sleep", "lease to trainer", "restore", "park states", "push 1"]


def test_a_server_that_says_it_sleeps_and_keeps_its_memory_is_killed(shared, world):
    world.kept = 2 * 10**9
    shared.to_trainer()
    assert world.killed == {URL: world.killed[URL]} and "2.0 GB are free, the trainer needs 3.0" in world.killed[URL]
    assert world.done == ["sleep", "lease to trainer", "restore"]


def test_memory_of_a_foreign_process_is_said_before_the_trainer_takes_any(shared, world):
    world.foreign = 2 * 10**9
    with pytest.raises(WeightSyncError, match=r"GPUs lack memory although all servers sleep.*rank 0: 2\.0 GB are free"):
        shared.to_trainer()
    assert world.done == ["sleep"]


def test_without_the_key_nothing_moves(tmp_path):
    own = start_placement(load_config(None, []), None, RunFolder(tmp_path), lambda phase: nullcontext())
    assert isinstance(own, OwnGpus) and not own.saves_first
    own.to_trainer()
    assert own.push(1).metrics(0) == {}


@pytest.mark.parametrize("key", ["null", "fp8"])
def test_weights_go_in_the_servers_form_and_the_error_of_blocks_is_a_metric(tmp_path, monkeypatch, key):
    source = Weights(weights_of(MIXTURE), MIXTURE)
    sent = []

    class Sync:
        def __init__(self, form, *_, **__) -> None:
            self._form = form

        def push(self, version: int) -> SyncReport:
            sent.append({spec.name for spec in self._form.specs()})
            self._form.gather(self._form.specs())
            return SyncReport(version, {}, 0, 0, 0, 1, 0, False, 0)

    monkeypatch.setattr(Agreement, "of_all_ranks", lambda timeout_s, error: SingleRank(error))
    monkeypatch.setattr(placement, "WeightSync", Sync)
    config = load_config(None, [f"actor_rollout_ref.rollout.quantization={key}", f"trainer.run_dir={tmp_path}"])
    own = start_placement(config, None, RunFolder(tmp_path), lambda phase: nullcontext())
    own.hold(source, [])
    error = own.push(1).metrics(0).get("weight_sync/fp8_relative_error")
    has_blocks = key == "fp8"
    assert any(name.endswith(".weight_scale_inv") for name in sent[0]) == has_blocks
    # normal numbers in steps of 2^-4 to 2^-3: the root mean square of a uniform error
    assert (error is not None and 0.02 < error < 0.04) if has_blocks else error is None


def test_a_run_from_before_the_keys_goes_on_with_or_without_shared_gpus():
    before = config_to_plain(load_config(None, []))
    del before["actor_rollout_ref"]["hybrid_engine"]
    for key in ("param_offload", "optimizer_offload"):
        del before["actor_rollout_ref"]["actor"]["megatron"][key]
    assert config_changes(before, load_config(None, [])) == []
    shared = load_config(None, ["actor_rollout_ref.hybrid_engine=true"])
    (change,) = config_changes(before, shared)
    assert change.key == "actor_rollout_ref.hybrid_engine" and not matters(change, shared)
