"""Servers over several nodes: their commands, their checks, and supervisors that start, judge and
restart all processes of a server together; servers are stand-ins."""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import sglang_server
from megatron_dapo.checks.rollout_checks import DP_ATTENTION
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers import supervisor as supervisor_module
from megatron_dapo.servers.run_servers import RunServers
from megatron_dapo.servers.server_command import ServerCommand, sglang_command
from megatron_dapo.servers.several_nodes import follower as follower_module
from megatron_dapo.servers.several_nodes import nodes_supervisor, server_node
from megatron_dapo.servers.several_nodes.nodes_supervisor import NodesSupervisor
from megatron_dapo.servers.several_nodes.server_node import NodeGroup
from megatron_dapo.servers.several_nodes.start_orders import FollowedOrders, StartOrders
from megatron_dapo.servers.supervisor import ServerFailure
from tests import fake_server
from tests.config_overrides import SOUND, mistakes
from tests.unit.test_start_orders import full_disk
from tests.unit.test_supervisor import can_connect, eventually
from tests.unit.test_supervisor_lease import ImaginedFiles, ImaginedProcess, ImaginedWatch, runs

pytestmark = pytest.mark.unit

SERVER = "actor_rollout_ref.rollout.server"
OVER_TWO = (f"{SERVER}.nodes_per_server=2", f"{SERVER}.tensor_model_parallel_size=4")


@pytest.fixture(autouse=True)
def short_polls_and_known_nodes(monkeypatch):
    monkeypatch.setattr(supervisor_module, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(server_node, "local_address_towards", lambda host: "127.0.0.1")


def config_of(folder: Path, *keys: str) -> Config:
    return load_config(None, [f"trainer.run_dir={folder}/run", *OVER_TWO, *(f"{SERVER}.{key}" for key in keys)])


def stand_in(leader: str = "serves", follower: str = "serves"):
    """A maker of commands; followers get port 0."""

    def command(config: Config, host: str, port: int, gpus: list[str]) -> ServerCommand:
        words = (sys.executable, fake_server.__file__, host, str(port), leader if port else follower)
        return ServerCommand(words, dict(os.environ))

    return command


def on_one_machine(folder: Path, *keys: str, **behaviours: str) -> NodesSupervisor:
    return NodesSupervisor(config_of(folder, *keys), folder, command_of=stand_in(**behaviours))


def on_node(folder: Path, name: str, *keys: str, **behaviours: str) -> NodesSupervisor:
    """Of nodes a and b; `folder` is shared by them."""
    config = config_of(folder, "nnodes=2", *keys)
    group = NodeGroup(("a", "b"), ("a", "b").index(name), 5000)
    return NodesSupervisor(config, folder, name="server-a", group=group, command_of=stand_in(**behaviours))


# ---------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("tensor_model_parallel_size=4 nodes_per_server=3", ["parallel_size is 4", "nodes_per_server 3", "change one"]),
        ("tensor_model_parallel_size=4 nodes_per_server=2 nnodes=3", ["nnodes is 3", "nodes_per_server 2", "change"]),
        (
            "tensor_model_parallel_size=4 nodes_per_server=2 nnodes=4 num_servers=3",
            ["num_servers is 3", "nnodes 4 / nodes_per_server 2", "change one"],
        ),
    ],
)
def test_numbers_that_do_not_divide_are_one_sentence_with_keys_values_and_cure(keys, words):
    (sentence,) = mistakes(" ".join(f"rollout.server.{key}" for key in keys.split()))
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("sizes", ["nnodes=4 num_servers=2", "nnodes=4 num_servers=4", "nnodes=0 num_servers=3"])
def test_servers_over_nodes_that_fit_are_taken(sizes):
    keys = f"tensor_model_parallel_size=4 nodes_per_server=2 {sizes}"
    assert mistakes(" ".join(f"rollout.server.{key}" for key in keys.split())) == []


@pytest.mark.parametrize("option", [*DP_ATTENTION, "--attn-dp"])
def test_dp_attention_whose_sockets_take_pickles_without_a_key_is_refused_over_nodes_alone(option):
    text = f"rollout.server.extra_args=[{option}=2]"
    over_two = "rollout.server.nodes_per_server=2 rollout.server.tensor_model_parallel_size=4"
    (sentence,) = mistakes(f"{over_two} {text}")
    assert option in sentence and "nodes_per_server 2" in sentence and "leave it out" in sentence
    assert mistakes(text) == []


@pytest.mark.parametrize("option", ["--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"])
def test_sglangs_own_options_of_nodes_are_refused_with_the_key_for_them(option):
    (sentence,) = mistakes(f"rollout.server.extra_args=[{option}=2]")
    assert option in sentence and "nodes_per_server" in sentence


# ---------------------------------------------------------------------------------- commands


def words_of(command: ServerCommand, *names: str) -> list[str]:
    """The values of these options."""
    return [command.command[command.command.index(name) + 1] for name in names]


def test_on_one_machine_a_servers_processes_meet_on_loopback_with_the_same_options_and_other_gpus(tmp_path):
    made: list[tuple[list[str], ServerCommand]] = []

    def command(config: Config, host: str, port: int, gpus: list[str]) -> ServerCommand:
        made.append((gpus, sglang_command(config, host, port, gpus)))
        return made[-1][1]

    servers = NodesSupervisor(config_of(tmp_path, "num_servers=2"), tmp_path, first_gpu=1, command_of=command)
    try:
        leaders = [server.command for server in servers._leader._servers]
        followers = [follower._command for follower in servers._followers]
        meeting = [words_of(each, "--dist-init-addr")[0] for each in leaders]
        assert [words_of(each, "--dist-init-addr")[0] for each in followers] == meeting
        assert len(set(meeting)) == 2 and all(place.startswith("127.0.0.1:") for place in meeting)
        numbers = [words_of(each, "--tp-size", "--nnodes", "--node-rank") for each in (*leaders, *followers)]
        assert numbers == [["4", "2", "0"]] * 2 + [["4", "2", "1"]] * 2
        assert [words_of(each, "--host", "--port") for each in followers] == [["127.0.0.1", "0"]] * 2
        assert [f"http://127.0.0.1:{words_of(each, '--port')[0]}" for each in leaders] == servers.urls
        assert [gpus for gpus, _ in made] == [["1", "2"], ["3", "4"], ["5", "6"], ["7", "8"]]
        assert leaders[0].environment == followers[0].environment == made[0][1].environment
    finally:
        servers.stop()


def test_over_nodes_they_meet_at_the_leader_and_speak_from_their_address_on_its_network(tmp_path, monkeypatch):
    monkeypatch.setattr(server_node, "local_address_towards", lambda host: {"a": "10.0.0.2", "b": "10.0.0.1"}[host])
    config = config_of(tmp_path, "nnodes=2", "num_servers=2", "extra_args=[--log-level,debug]")
    for name, rank, address in (("a", "0", "10.0.0.1"), ("b", "1", "10.0.0.2")):
        node = NodeGroup.of(config, ("a", "b"), name, 5000).node(2)
        made = node.command(1, sglang_command(config, "0.0.0.0", 1, []))
        assert words_of(made, "--nnodes", "--node-rank", "--dist-init-addr") == ["2", rank, "a:5001"]
        assert made.environment["SGLANG_HOST_IP"] == address
        monkeypatch.setenv("SGLANG_HOST_IP", "10.9.9.9")
        made = node.command(1, sglang_command(config, "0.0.0.0", 1, []))
        assert made.environment["SGLANG_HOST_IP"] == "10.9.9.9", "the user's value takes precedence"
        monkeypatch.delenv("SGLANG_HOST_IP")


def test_a_server_of_one_node_has_none_of_these_options(tmp_path):
    command = ServerCommand(("serve",), {})
    assert server_node.ONE_NODE.command(0, command) is command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server-nodes", "a", "--node", "a", "--meeting-port", "1"], "--server-nodes a must be 2 different nodes"),
        (["--server-nodes", "a,a", "--node", "a", "--meeting-port", "1"], "must be 2 different nodes"),
        (["--server-nodes", "a,b", "--node", "c", "--meeting-port", "1"], "--node c is none of --server-nodes a,b"),
        (["--server-nodes", "a,b", "--node", "a"], "--server-nodes needs --meeting-port"),
    ],
)
def test_wrong_words_about_the_nodes_are_one_sentence_and_start_nothing(tmp_path, capsys, options, words):
    assert sglang_server.main([*options, *SOUND, *OVER_TWO, f"trainer.run_dir={tmp_path}/run"]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.glob("run/logs/*.log"))


# ---------------------------------------------------------------------------------- one machine


def test_leader_and_follower_start_together_and_none_is_left_after_stop(tmp_path):
    servers = on_one_machine(tmp_path, "num_servers=2")
    servers.start()
    try:
        while not servers.check():
            time.sleep(0.05)
        pids = servers.pids()
        assert len(servers.urls) == 2 and all(map(can_connect, servers.urls)) and len(set(pids)) == 4
        words = [psutil.Process(pid).cmdline() for pid in pids]
        assert [line[line.index("--node-rank") + 1] for line in words] == ["0", "0", "1", "1"]
        assert (tmp_path / "server-1-node-1.log").exists() and servers.were_healthy
    finally:
        servers.stop()
    assert not any(map(runs, pids))
    servers.stop()  # harmless


@pytest.mark.parametrize("killed", [0, 1], ids=["leader", "follower"])
def test_when_one_process_dies_all_of_its_server_are_restarted_as_one_restart(tmp_path, caplog, killed):
    caplog.set_level("INFO")
    servers = on_one_machine(tmp_path, "max_restarts=1")
    servers.start()
    try:
        while not servers.check():
            time.sleep(0.05)
        url, first = servers.urls, servers.pids()
        os.kill(first[killed], signal.SIGKILL)
        assert eventually(lambda: servers.check() and not set(first) & set(servers.pids()))
        assert servers.urls == url and can_connect(url[0]) and not any(map(runs, first))
        assert caplog.text.count("restart 1 of 1") == 1 and "restart 2" not in caplog.text
        words = "server-0-node-1 was killed by SIGKILL" if killed else f"server-0 at {url[0]} was killed by SIGKILL"
        assert words in caplog.text
    finally:
        servers.stop()


def test_a_leader_that_its_watch_kills_brings_its_follower_down_too(tmp_path, monkeypatch, caplog):
    failures = iter([None, None, "has not answered for 120 s"])
    watch = type("Watch", (ImaginedWatch,), {"failure": lambda self: next(failures, None)})
    monkeypatch.setattr(supervisor_module, "ServerWatch", watch)
    servers = on_one_machine(tmp_path)
    servers.start()
    try:
        while not servers.check():
            time.sleep(0.05)
        first = servers.pids()
        assert eventually(lambda: servers.check() and not set(first) & set(servers.pids()))
        assert not any(map(runs, first)) and "and is killed; restart 1 of 3" in caplog.text
    finally:
        servers.stop()


def test_a_follower_that_cannot_start_is_named_with_its_log_and_counts_as_its_server(tmp_path, caplog):
    servers = on_one_machine(tmp_path, "max_restarts=1", follower="dies")
    servers.start()
    try:
        with pytest.raises(ServerFailure) as failure:
            while True:
                servers.check()
                time.sleep(0.02)
    finally:
        servers.stop()
    message = str(failure.value)
    for part in ("after 1 restarts", "lost a process: server-0-node-1 ended with exit code 1", "server-0-node-1.log"):
        assert part in message
    assert "out of luck" in message.splitlines()[0], "the follower's own words"
    assert (tmp_path / "server-0-node-1.log").read_text().count("out of luck") == 2


def test_a_node_that_cannot_start_its_follower_costs_a_restart(tmp_path, monkeypatch, caplog):
    start, errors = follower_module.ServerStart, [OSError(28, "No space left on device")]

    def fails_once(*arguments):
        if errors:
            raise errors.pop()
        return start(*arguments)

    monkeypatch.setattr(follower_module, "ServerStart", fails_once)
    servers = on_one_machine(tmp_path, "max_restarts=1")
    servers.start()
    try:
        assert eventually(lambda: servers.check() and len(servers.pids()) == 2)
        words = "lost a process: server-0-node-1 could not be started ([Errno 28] No space left on device)"
        assert words in caplog.text and caplog.text.count("restart 1 of 1") == 1
    finally:
        servers.stop()


def test_a_followers_end_is_logged_once_however_often_its_report_fails(tmp_path, caplog):
    orders = StartOrders(tmp_path / "run" / "server_starts" / "server-a-0", 1)
    orders.start()
    followers = on_node(tmp_path, "b", follower="dies")
    followers.start()
    try:
        with full_disk():
            assert eventually(lambda: not followers.check() and "cannot be written" in caplog.text)
            assert not any(followers.check() for _ in range(3)) and orders.failure() is None
        assert caplog.text.count("ended with exit code 1") == caplog.text.count("cannot be written") == 1
        followers.check()
        assert "server-a-0-node-1 ended with exit code 1 (out of luck)" in orders.failure()
    finally:
        followers.stop()


def test_a_server_that_never_becomes_healthy_names_the_logs_of_all_its_nodes(tmp_path):
    servers = on_one_machine(tmp_path, "startup_timeout_s=0.3", leader="hangs")
    servers.start()
    try:
        with pytest.raises(ServerFailure, match=r"server-0\.log \(of its other nodes: server-0-node-\*\.log\)"):
            while True:
                servers.check()
    finally:
        servers.stop()


@contextmanager
def reward_models_alone() -> Iterator[mock.Mock]:
    """The maker of reward models' supervisors: nothing reads their model."""
    with mock.patch("megatron_dapo.servers.run_servers._of_reward_model"):
        with mock.patch("megatron_dapo.servers.run_servers.ServerSupervisor") as made:
            yield made


@pytest.mark.parametrize("nnodes", [0, 2])
@pytest.mark.parametrize(("group", "first_gpu"), [(None, 4), (NodeGroup(("a", "b"), 0, 5000), 2)])
def test_the_reward_models_gpus_follow_those_of_all_processes_here(tmp_path, nnodes, group, first_gpu):
    """Without a group all GPUs of a server are taken here, in a group its share of them: that the
    servers have nodes in the config says nothing of it."""
    with reward_models_alone() as made, mock.patch("megatron_dapo.servers.run_servers.NodesSupervisor") as led:
        keys = {"rollout": True, "reward_model": True, "first_port": 9, "node": group and "a", "group": group}
        RunServers(config_of(tmp_path, f"nnodes={nnodes}"), tmp_path, **keys)
    assert made.call_args.kwargs["first_gpu"] == first_gpu and made.call_args.kwargs["first_port"] == 10
    assert led.call_args.kwargs["name"] == ("server-a" if group else "server")


def test_a_followers_node_that_serves_a_reward_model_too_is_not_over_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(NodesSupervisor, "are_over", True)
    monkeypatch.setattr(nodes_supervisor, "sglang_command", stand_in())
    made_of = {"rollout": True, "group": NodeGroup(("a", "b"), 1, 5000)}
    assert RunServers(config_of(tmp_path, "nnodes=2"), tmp_path, reward_model=False, **made_of).are_over
    with reward_models_alone() as made:
        servers = RunServers(config_of(tmp_path, "nnodes=2"), tmp_path, reward_model=True, **made_of)
    assert not servers.are_over
    made.return_value.check.side_effect = ServerFailure("it died too often")
    servers.check()
    assert servers.are_over


def test_the_processes_of_a_node_have_one_grace_period_together(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes_supervisor, "STOP_GRACE_S", 0.3)
    servers = on_one_machine(tmp_path)
    with mock.patch.object(servers._leader, "stop", lambda: time.sleep(0.3)):
        with mock.patch.object(servers, "_followers", [mock.Mock()]) as (follower,):
            servers.stop()
    assert [each[0] for each in follower.method_calls] == ["ask_to_end", "stop"]
    assert follower.stop.call_args.args == (0.0,)
    servers.stop()


# ---------------------------------------------------------------------------------- two nodes


def test_when_a_leader_is_given_up_its_followers_end_and_their_node_has_nothing_left_to_do(tmp_path):
    leader = on_node(tmp_path, "a", "max_restarts=0")
    leader.start()
    followers = on_node(tmp_path, "b")
    try:
        while not (leader.check() & followers.check()):
            time.sleep(0.05)
        assert followers.urls == [] and followers.were_healthy and not followers.are_over
        (follower,) = followers.pids()
        os.kill(leader.pids()[0], signal.SIGKILL)
        with pytest.raises(ServerFailure, match="after 0 restarts"):
            while True:
                leader.check()
        assert runs(follower)
        followers.check()
        assert followers.are_over and followers.pids() == [] and eventually(lambda: not runs(follower))
    finally:
        leader.stop()
        followers.stop()


def test_the_program_of_a_followers_node_prints_no_url_and_ends_well_with_its_leaders(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nodes_supervisor, "sglang_command", stand_in())
    monkeypatch.setattr(sglang_server, "POLL_INTERVAL_S", 0.02)
    config = config_of(tmp_path, "nnodes=2")
    orders = StartOrders(tmp_path / "run" / "server_starts" / "server-a-0", 1)
    orders.start()

    def stop_when_it_runs() -> None:
        if "fake server" in (log.read_text() if (log := tmp_path / "server-a-0-node-1.log").exists() else ""):
            orders.stop()

    look = NodesSupervisor.check
    monkeypatch.setattr(NodesSupervisor, "check", lambda servers: [look(servers), stop_when_it_runs()][0])
    assert sglang_server.serve(config, tmp_path, 9, "b", group=NodeGroup(("a", "b"), 1, 5000)) == 0
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------- any order of events


class Process(ImaginedProcess):
    """With a name."""

    def __init__(self, name: str, *_: object) -> None:
        super().__init__()
        self.name = name


def alive(name: str) -> list[Process]:
    return [process for process in Process.all if process.name == name and not process.is_gone()]


LEADER, FOLLOWER = "server-a-0", "server-a-0-node-1"
EVENTS = st.lists(
    st.sampled_from(["a looks", "b looks", "leader dies", "follower dies", "ready", "disk full", "disk free"]),
    max_size=30,
)


def check_events(events: Sequence[str]) -> None:
    """Live through the events; then both nodes run one process, of the same start, and no death has
    cost more than a restart."""
    Process.all, Process.started_for = [], []
    ImaginedProcess.all = Process.all
    num_deaths, disk = Counter(), ExitStack()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, by in {"ChildProcess": Process, "ServerWatch": ImaginedWatch, "ServerFiles": ImaginedFiles}.items():
            stack.enter_context(mock.patch.object(supervisor_module, name, by))
        stack.enter_context(mock.patch.object(supervisor_module, "MAX_BACKOFF_S", 0.0))
        answers = lambda server, *_: 200 if server.current.process.is_ready else 503  # noqa: E731
        stack.enter_context(mock.patch.object(supervisor_module.SupervisedServer, "status_of", answers))
        nodes = {"a": on_node(folder, "a", "max_restarts=1000"), "b": on_node(folder, "b")}
        [server] = nodes["a"]._leader._servers
        nodes["a"].start()
        nodes["b"].start()

        def happen(event: str) -> None:
            who = {"leader dies": LEADER, "follower dies": FOLLOWER}.get(event)
            for process in alive(who) if who else ():
                process.stop(0.0)
                num_deaths[who] += 1
            for process in alive(LEADER) if event == "ready" else ():
                process.is_ready = True
            if event == "disk full":
                disk.enter_context(full_disk())
            elif event == "disk free":
                disk.close()
            elif event.endswith("looks"):
                nodes[event[0]].check()
            assert len(alive(LEADER)) <= 1 and len(alive(FOLLOWER)) <= 1

        for event in [*events, "disk free", *["a looks", "b looks", "ready"] * 4]:
            happen(event)
        [follower] = nodes["b"]._followers
        assert len(alive(LEADER)) == len(alive(FOLLOWER)) == 1
        assert follower._obeyed == server.orders._order and nodes["a"].check() and nodes["b"].check()
        assert server.num_restarts <= sum(num_deaths.values())
        num_starts = Counter(process.name for process in Process.all)
        assert num_starts[LEADER] == server.num_restarts + 1 >= num_starts[FOLLOWER], "a follower starts by itself"
        for node in nodes.values():
            node.stop()
        assert not alive(LEADER) + alive(FOLLOWER)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_in_any_order_of_looks_and_deaths_both_nodes_end_up_with_the_same_start(events):
    check_events(events)


def old_reports_count(orders: StartOrders) -> str | None:
    file = orders._folder / "end-1"
    return file.read_text() if file.exists() else None


MUTANTS = {
    "the leader does not hear of its follower": (StartOrders, "failure", lambda self: None),
    "a report of an earlier start counts": (StartOrders, "failure", old_reports_count),
    "a new start has no new name": (StartOrders, "start", lambda self: self._give("always")),
    "the follower reports nothing": (FollowedOrders, "report", lambda *_: True),
}
EVENTFUL = ["b looks", "a looks", "ready", "a looks", "follower dies", "b looks", "a looks", "leader dies", "a looks"]
EVENTFUL += ["b looks", "ready", "a looks", "follower dies"]


@pytest.mark.parametrize("mutant", [None, *MUTANTS.values()], ids=["as it is", *MUTANTS])
def test_an_agreement_without_one_of_its_rules_is_caught(monkeypatch, mutant):
    if mutant:
        monkeypatch.setattr(*mutant)
    with pytest.raises(AssertionError) if mutant else nullcontext():
        check_events(EVENTFUL)
