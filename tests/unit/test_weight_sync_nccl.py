"""The trainer's calls to NCCL and torch, and their times, for servers on GPUs;
with stand-ins for both."""

import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from launch.preflight import all_reduce
from megatron_dapo.platform import nccl
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.broadcast_group import BroadcastGroup

pytestmark = pytest.mark.unit

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
CUDA = torch.device("cuda", 0)
WAIT_S = 20.0  # for milliseconds of work


class Nccl:
    """In place of torch's process group: notes its creation and the calls to it."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.blocking_wait = os.environ.get(BLOCKING_WAIT)
        self.limits: list[timedelta] = []
        self.may_end, self.has_ended = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def broadcast(self, tensors: list, options: dist.BroadcastOptions) -> "Nccl":
        assert len(tensors) == 1 and options.rootRank == 0
        return self

    def wait(self, limit: timedelta) -> None:
        self.limits.append(limit)
        if self.error:
            raise self.error

    def abort(self) -> None:
        assert self.may_end.wait(WAIT_S)
        self.has_ended.set()


@pytest.fixture
def made(monkeypatch) -> list[Nccl]:
    """The groups of NCCL that were made."""
    groups: list[Nccl] = []

    class Noted(Nccl):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            groups.append(self)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Noted, raising=False)
    nothing = SimpleNamespace(record=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: nothing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(os, "environ", {})
    nccl.prepare()
    yield groups
    for group in groups:
        group.may_end.set()


def test_no_watchdog_ends_the_trainer_for_a_server_that_dies(made):
    """torch reads the setting when a group is made: this one has it,
    the trainer's others have not."""
    group = BroadcastGroup("weights-0", "127.0.0.1", 5, CUDA, 7.0)
    group.ready.result(WAIT_S)
    assert (made[0].blocking_wait, os.environ[BLOCKING_WAIT]) == ("1", "0")
    assert (made[0].rank, made[0].size, made[0].options._timeout) == (0, 5, timedelta(seconds=7))
    group.broadcast([torch.zeros(2), torch.zeros(3)], 11.0).result(WAIT_S)
    assert made[0].limits == [timedelta(seconds=11)] * 2, "each push has its own limit, not that of the join"
    made[0].error = RuntimeError("remote process exited")
    failed = group.broadcast([torch.zeros(2)], 11.0)
    assert "remote process exited" in str(failed.exception(WAIT_S))
    group.close()


def test_a_group_is_left_at_once_though_nccl_takes_long_to_abort_it(made):
    group = BroadcastGroup("weights-0", "127.0.0.1", 2, CUDA, 7.0)
    group.ready.result(WAIT_S)
    group.close()
    assert not made[0].has_ended.is_set(), "close waited for it"
    made[0].may_end.set()
    assert made[0].has_ended.wait(WAIT_S)
    group.close()  # harmless


def test_an_abandoned_group_begins_no_waiting_broadcast(made):
    group = BroadcastGroup("weights-0", "127.0.0.1", 2, CUDA, 7.0)
    group.ready.result(WAIT_S)
    is_under_way = threading.Event()
    may_end = made[0].may_end

    def wait(limit: timedelta) -> None:
        made[0].limits.append(limit)
        is_under_way.set()
        assert may_end.wait(WAIT_S)

    made[0].wait = wait
    first, second = (group.broadcast([torch.zeros(2)], limit) for limit in (11.0, 12.0))
    assert is_under_way.wait(WAIT_S)
    group.close()
    may_end.set()
    first.result(WAIT_S)
    assert second.cancelled() and made[0].limits == [timedelta(seconds=11)]


@pytest.mark.parametrize(("name", "device"), [("nccl", CUDA), ("gloo", torch.device("cpu"))])
def test_trainer_and_servers_meet_under_the_keys_of_torchs_own_helper(made, monkeypatch, name, device):
    """SGLang joins through torch, which puts the first device of the backend into the keys."""
    stores = []
    if name == "gloo":
        monkeypatch.setattr(dist, "ProcessGroupGloo", lambda store, *_: stores.append(store))
    group = BroadcastGroup("weights-1", "127.0.0.1", 2, device, 7.0)
    group.ready.result(WAIT_S)
    store = stores[0] if stores else made[0].store
    store.set("0", "id")
    store_of_torch = dist.TCPStore("127.0.0.1", group.port, is_master=False, wait_for_workers=False)
    first = next(iter(BackendConfig(Backend(name)).get_device_backend_map()))
    for prefix in ("weights-1", "weights-1/", f"{first}/"):
        store_of_torch = dist.PrefixStore(prefix, store_of_torch)
    assert store_of_torch.check(["0"]) and store_of_torch.get("0") == b"id"
    group.close()


@pytest.fixture
def seen(monkeypatch) -> list[dict]:
    """NCCL's settings whenever a process joins its job, which it does not do."""
    noted = []

    def join(*_: object, **__: object) -> None:
        noted.append({name: os.environ.get(name) for name in (*nccl.ENVIRONMENT, BLOCKING_WAIT)})
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", join)
    return noted


def test_the_trainer_prepares_nccl_before_it_joins_and_keeps_the_users_settings(seen, monkeypatch):
    monkeypatch.setattr("megatron_dapo.platform.parallel.prepare_megatron", lambda: None)
    monkeypatch.setattr("megatron_dapo.platform.parallel.is_gpu", lambda: True)
    for environment in ({}, dict.fromkeys((*nccl.ENVIRONMENT, BLOCKING_WAIT), "1")):
        monkeypatch.setattr(os, "environ", environment)
        with pytest.raises(InterruptedError):
            ParallelLayout.initialize()
    assert seen[0] == {"NCCL_CUMEM_ENABLE": "0", BLOCKING_WAIT: "0"}
    assert set(seen[1].values()) == {"1"}


def test_the_preflight_measures_nccl_as_the_run_will_use_it(seen, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(InterruptedError):
        all_reduce._all_reduce(all_reduce.AllReduceTask("ring", ("127.0.0.1", store.port), 0, 2, "nccl", 0, WAIT_S))
    assert seen == [{"NCCL_CUMEM_ENABLE": "0", BLOCKING_WAIT: "0"}]
