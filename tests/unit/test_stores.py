"""The stores in which ranks meet: access from outside, and the weight of a stranger's words."""

import os
import socket
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from megatron_dapo.platform import stores
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.platform.watchdog import Watchdog

pytestmark = pytest.mark.unit

SOON = timedelta(seconds=20)


def listens_on(port: int) -> set[str]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {
        connection.laddr.ip
        for connection in connections
        if connection.status == "LISTEN" and connection.laddr.port == port
    }


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_listens_only_on_the_address_of_its_ranks(address):
    hosted = stores.host_store(address, 0, SOON)
    assert listens_on(hosted.port) == {"127.0.0.1"}
    joined = stores.join_store(address, hosted.port, SOON)
    joined.set("key", "value")
    assert hosted.get("key") == b"value"


def test_a_port_that_a_launcher_holds_reserved_is_the_stores():
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        assert stores.host_store("127.0.0.1", port, SOON).port == port and listens_on(port) == {"127.0.0.1"}


def test_a_name_that_others_may_resolve_to_another_address_is_served_on_all():
    hosted = stores.host_store(socket.gethostname(), 0, SOON)
    assert listens_on(hosted.port) & {"::", "0.0.0.0"}


def test_ranks_of_one_machine_meet_on_loopback_under_any_host_name(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node1.example")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert stores.meeting_address() == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert stores.meeting_address() == "node1.example"


@pytest.fixture
def trainer_environment(monkeypatch, free_port):
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return free_port


def test_the_store_of_the_trainers_process_group_is_on_loopback_under_one_launcher(trainer_environment):
    meeting = stores.rendezvous(SOON)
    assert (meeting["rank"], meeting["world_size"]) == (0, 1) and listens_on(trainer_environment) == {"127.0.0.1"}


def test_a_store_that_torchruns_agent_keeps_is_joined(trainer_environment, monkeypatch):
    agents = dist.TCPStore("127.0.0.1", trainer_environment, 1, True, SOON, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores.rendezvous(SOON)["store"].set("key", "value")
    assert agents.get("default_pg/key") == b"value"


def test_what_a_stranger_writes_to_a_store_does_not_count():
    hosted = stores.host_store("127.0.0.1", 0, SOON)
    rank, stranger = stores.SignedStore(hosted, b"token"), stores.join_store("127.0.0.1", hosted.port, SOON)
    rank.set("alarm", "")
    assert rank.get("alarm") == [""]
    for forged in (b"hello", b"", b"\xff" * 80, stores.SignedStore(stranger, b"guess")._signed("alarm", "hello")):
        stranger.set("alarm", forged)
        assert rank.get("alarm") == [None]
    rank.set_first("alarm", "rank 1 hangs")
    assert rank.get("alarm") == ["rank 1 hangs"], "a stranger's word keeps no rank's from being heard"
    rank.set_first("alarm", "rank 0 hangs")
    assert rank.get("alarm") == ["rank 1 hangs"]
    stranger.set("place", stranger.get("alarm"))
    assert rank.get("place") == [None], "nor does a rank's word under another key"


def test_a_strangers_alarm_does_not_end_a_run(tmp_path):
    """It ended one, with code 14 and the stranger's words."""

    class Rank(SingleRank):
        gathered: list = []

        def gather(self, value: object) -> list:
            self.gathered.append(value)
            return [value]

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            rank = Rank()
            with Watchdog(rank, tmp_path / "hang", {}, default_s=60.0, silence_s=60.0) as own:
                stranger = stores.join_store("127.0.0.1", rank.gathered[0][0], SOON)
                stranger.set("alarm", "hello from a stranger")
                before = own._num_exchanges
                while own._num_exchanges < before + 3:
                    time.sleep(0.05)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
