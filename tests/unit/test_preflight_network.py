"""NCCL's network between nodes, read from its log, and told; sockets are refused unless wanted."""

import os
from pathlib import Path

import pytest

from launch.preflight import all_reduce
from launch.preflight.all_reduce import AllReduceTask

pytestmark = pytest.mark.unit

# output of NCCL 2.21, 2.27 and 2.30 (src/init.cc, src/plugin/net.cc) with NCCL_DEBUG=INFO
OF_SOCKETS = """\
n1:880:887 [0] NCCL INFO NET/IB : No device found.
n1:880:887 [0] NCCL INFO NET/Socket : Using [0]eth0:172.17.0.2<0>
n1:880:887 [0] NCCL INFO Using non-device net plugin version 0
n1:880:887 [0] NCCL INFO Using network Socket
n1:880:887 [0] NCCL INFO comm 0x55ba65abd9d0 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId a
"""
OF_INFINIBAND = """\
n1:9:12 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>
n1:9:12 [0] NCCL INFO Initialized NET plugin IB
n1:9:12 [0] NCCL INFO Assigned NET plugin IB to comm
n1:9:12 [0] NCCL INFO Using network IB
"""
OF_NEWER_SOCKETS = """\
n1:9:12 [0] NCCL INFO Failed to initialize NET plugin IB
n1:9:12 [0] NCCL INFO Initialized NET plugin Socket
n1:9:12 [0] NCCL INFO Assigned NET plugin Socket to comm
"""


@pytest.mark.parametrize(
    ("log", "network"),
    [
        (OF_SOCKETS, "Socket"),
        (OF_INFINIBAND, "IB"),
        (OF_NEWER_SOCKETS, "Socket"),
        ("n1:9:12 [0] NCCL INFO Using network AWS Libfabric\n", "AWS Libfabric"),
        ("", ""),
        ("NCCL version 2.30.7+cuda13.0\n", ""),
    ],
)
def test_the_network_is_named_by_nccl(log, network):
    assert all_reduce.network_of(log) == network


class Nodes:
    """Nodes that all find the same, of which this is the first."""

    timeout_s = 20.0
    address = ("127.0.0.1", 1)

    def __init__(self, count: int) -> None:
        self.index = 0
        self.count = count

    def gather(self, what: str, value: object) -> list:
        return [value] * self.count


class Ranks:
    """The ranks of one node that has run an all-reduce."""

    count = 8

    def __init__(self, network: str) -> None:
        self.network = network

    def run(self, jobs: object, nodes: Nodes) -> float:
        return 0.01

    def end(self) -> None:
        pass


def result_of(network: str, num_nodes: int) -> all_reduce.Result:
    return all_reduce.check(Nodes(num_nodes), "trainer", [range(num_nodes)], [Ranks(network)], "nccl", 5.0)


@pytest.fixture
def no_wishes(monkeypatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_sockets_between_nodes_are_refused_however_fast_they_are(no_wishes):
    result = result_of("Socket", 2)
    assert "GB/s over 16 ranks (nccl, Socket, at least 5)" in result.found
    assert all(words in result.problem for words in ("takes sockets", "ibverbs-providers", "NCCL_NET=Socket"))


def test_a_node_without_a_fabric_is_named_even_if_the_all_reduce_is_slow(no_wishes):
    """The others, servers among them, know it and look for no slow node: they would wait for it."""

    class Others(Nodes):
        def gather(self, what: str, value: object) -> list:
            what = what.removeprefix("trainer: ")
            assert what in ("ranks per node", "ring", "network")
            return [value, {"ring": 100.0, "network": True}.get(what, value), *[value] * (self.count - 2)]

    result = all_reduce.check(Others(3), "trainer", [range(3)], [Ranks("IB")] * 3, "nccl", 5.0)
    assert result.problem is None and "GB/s over 24 ranks (nccl, IB," in result.found


@pytest.mark.parametrize(("name", "value"), [("NCCL_NET", "Socket"), ("NCCL_NET", "socket"), ("NCCL_IB_DISABLE", "1")])
def test_sockets_that_the_user_asks_for_are_no_problem(no_wishes, name, value):
    no_wishes.setenv(name, value)
    assert result_of("Socket", 2).problem is None


@pytest.mark.parametrize(("network", "num_nodes"), [("IB", 2), ("AWS Libfabric", 2), ("Socket", 1)])
def test_another_network_and_one_node_are_no_problem_and_the_network_is_named(no_wishes, network, num_nodes):
    result = result_of(network, num_nodes)
    assert result.problem is None and f"(nccl, {network}, " in result.found


@pytest.mark.parametrize(("wish", "is_shown"), [(None, False), ("INFO", True)])
def test_a_rank_asks_nccl_for_its_log_and_keeps_it_from_nobody(no_wishes, capfd, wish, is_shown):
    def seconds(job: AllReduceTask) -> float:
        assert os.environ["NCCL_DEBUG"] == "INFO"
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(OF_SOCKETS)
        return 0.5

    no_wishes.setattr(all_reduce, "_seconds", seconds)
    no_wishes.setattr(os, "environ", {"NCCL_DEBUG": wish} if wish else {})
    task = AllReduceTask("ring", ("127.0.0.1", 1), 0, 2, "nccl", 0, 20.0)
    assert all_reduce._all_reduce(task) == (0.5, "Socket")
    assert ("Using network Socket" in capfd.readouterr().err) == is_shown


def test_a_log_that_the_user_wants_elsewhere_goes_there(no_wishes):
    no_wishes.setattr(all_reduce, "_seconds", lambda job: 0.5)
    no_wishes.setattr(os, "environ", {"NCCL_DEBUG_FILE": "/tmp/of-the-user.%h"})
    task = AllReduceTask("ring", ("127.0.0.1", 1), 0, 2, "nccl", 0, 20.0)
    assert all_reduce._all_reduce(task) == (0.5, "network unknown")
    assert os.environ == {"NCCL_DEBUG_FILE": "/tmp/of-the-user.%h"}
