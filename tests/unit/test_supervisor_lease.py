"""A supervisor and the lease of shared GPUs: servers start only while the lease is theirs."""

import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config.derived import shares_gpus
from megatron_dapo.config.loader import load_config
from megatron_dapo.servers import supervisor as supervisor_module
from megatron_dapo.servers.child_process import ChildProcess
from megatron_dapo.servers.followed_lease import FollowedLease as FOLLOWED
from megatron_dapo.servers.run_servers import _of_reward_model
from megatron_dapo.servers.server_health import HealthCheck, StartState
from megatron_dapo.servers.supervisor import ServerFailure, ServerSupervisor
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from tests.unit.test_supervisor import eventually, supervisor

pytestmark = pytest.mark.unit

ON = "actor_rollout_ref.hybrid_engine=true"
STARTING, READY = '{"/ready": 503}', '{"/ready": 200}'


@pytest.fixture
def lease(tmp_path) -> LeaseFolder:
    return LeaseFolder(RunFolder(tmp_path / "run").lease)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Servers, made and ended; answers(text) is what all say from now on about their health."""
    monkeypatch.setattr(supervisor_module, "POLL_INTERVAL_S", 0.05)
    file = tmp_path / "answers.json"
    all_made: list[ServerSupervisor] = []

    def answers(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(file)

    def make(*keys: str, overrides: tuple[str, ...] = (ON,)) -> ServerSupervisor:
        all_made.append(supervisor(tmp_path, f"answers {file}", *keys, overrides=overrides))
        return all_made[-1]

    answers(READY)
    make.answers = answers
    yield make
    for servers in all_made:
        servers.stop()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid)  # the supervisor waits for its children: none is left as a zombie


def runs(pid: int) -> bool:
    """Whether it is alive, and no zombie."""
    return is_alive(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_still_starting_when_the_trainer_is_due_is_killed_and_started_again_later(made, lease, caplog):
    """Which is no restart: it did nothing wrong."""
    made.answers(STARTING)
    servers = made("max_restarts=0")
    servers.start()
    assert not servers.check()
    (url,), (first,) = servers.urls, servers.pids()
    now = lease.write(Holder.MOVING)
    assert not servers.check() and is_alive(first), "it may come up while the others fall asleep"
    assert lease.gone(now.turn) == set()

    now = lease.write(Holder.TRAINER)
    for _ in range(3):
        assert not servers.check()
    assert servers.pids() == [first] and lease.gone(now.turn) == {url}

    made.answers(READY)
    now = lease.write(Holder.SERVERS)
    servers.wait_healthy()
    assert servers.pids() != [first] and lease.gone(now.turn) == set()
    assert "restart 1 of" not in caplog.text


def test_a_server_that_dies_asleep_is_answered_at_once_and_started_again_when_the_lease_is_the_servers(made, lease):
    servers = made("num_servers=2", "max_restarts=1")
    servers.start()
    servers.wait_healthy()
    first, other = servers.pids()
    now = lease.write(Holder.TRAINER)
    assert servers.check() and lease.gone(now.turn) == set()
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: not servers.check())
    assert lease.gone(now.turn) == {servers.urls[0]}
    for _ in range(3):
        assert not servers.check()
    assert servers.pids() == [first, other]
    lease.write(Holder.SERVERS)
    servers.wait_healthy()
    assert servers.pids()[0] != first and servers.pids()[1] == other


def test_a_condemned_server_is_killed_asleep_and_awake_and_each_time_is_a_restart(made, lease, caplog):
    servers = made("num_servers=2", "max_restarts=2")
    servers.start()
    servers.wait_healthy()
    url, other = servers.urls[0], servers.pids()[1]
    asleep = servers.pids()[0]
    now = lease.write(Holder.MOVING, [url, "http://elsewhere:1"])
    assert not servers.check()
    assert not is_alive(asleep) and is_alive(other) and lease.gone(now.turn) == {url}
    assert "restart 1 of 2" in caplog.text

    lease.write(Holder.SERVERS)
    servers.wait_healthy()
    awake = servers.pids()[0]
    now = lease.write(Holder.SERVERS, [url])  # left out of a push
    assert eventually(lambda: servers.check() and not is_alive(awake))
    again = servers.pids()[0]
    for _ in range(3):
        assert servers.check()
    assert servers.pids() == [again, other] and again != awake, "condemned once a turn"
    assert "restart 2 of 2" in caplog.text and lease.gone(now.turn) == set()

    now = lease.write(Holder.MOVING, [url])
    assert servers.check()
    assert "server-0 is given up" in caplog.text and not is_alive(again)
    now = lease.write(Holder.TRAINER)
    assert servers.check() and lease.gone(now.turn) == {url}, "one that is given up holds nothing at any turn"


def test_condemned_servers_are_all_killed_before_one_is_waited_for(tmp_path, lease, monkeypatch):
    """A server of a GPU takes seconds to die, and the trainer waits for all of them together."""
    servers = supervisor(tmp_path, "ignores SIGTERM", "num_servers=3", overrides=[ON])
    stop = ChildProcess.stop

    def stop_when_all_are_dead(process: ChildProcess, grace_s: float) -> int:
        assert eventually(lambda: not any(map(runs, pids))), "the others live while one is ended"
        return stop(process, grace_s)

    servers.start()
    try:
        servers.wait_healthy()
        pids = servers.pids()
        with monkeypatch.context() as patch:
            patch.setattr(ChildProcess, "stop", stop_when_all_are_dead)
            now = lease.write(Holder.MOVING, servers.urls)
            servers.check()
        assert lease.gone(now.turn) == set(servers.urls)
    finally:
        servers.stop()


def test_a_condemned_server_that_is_still_starting_is_killed_and_not_counted(made, lease, caplog):
    made.answers(STARTING)
    servers = made()
    servers.start()
    (first,) = servers.pids()
    now = lease.write(Holder.MOVING, servers.urls)
    assert not servers.check() and not is_alive(first)
    assert lease.gone(now.turn) == set(servers.urls) and "restart 1 of" not in caplog.text


def test_after_the_last_server_and_after_a_stop_all_later_turns_are_answered(made, lease):
    """Nobody looks at the lease any more, but the trainer may still save its step."""
    servers = made("max_restarts=0")
    servers.start()
    servers.wait_healthy()
    now = lease.write(Holder.TRAINER, servers.urls)
    with pytest.raises(ServerFailure, match="none is left"):
        servers.check()
    assert lease.gone(now.turn + 100) == set(servers.urls)

    others = made()
    others.start()
    others.stop()
    assert lease.gone(now.turn + 100) == set(others.urls)


def test_a_server_of_several_processes_is_gone_with_the_last_of_them(tmp_path, lease):
    servers = supervisor(tmp_path, "has a child", overrides=[ON])
    servers.start()
    try:
        servers.wait_healthy()
        child = psutil.Process(int((tmp_path / "server-0.log").read_text().partition("child ")[2].split()[0]))
        servers.check()
        now = lease.write(Holder.MOVING, servers.urls)
        servers.check()
        assert lease.gone(now.turn) == set(servers.urls)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        servers.stop()


def test_servers_with_gpus_of_their_own_follow_no_lease(made, lease):
    servers = made(overrides=())
    now = lease.write(Holder.TRAINER, servers.urls)
    servers.start()
    servers.wait_healthy()
    assert lease.gone(now.turn) == set()


def test_a_reward_models_server_follows_no_lease(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}')
    (tmp_path / "tokenizer.json").write_text("{}")
    config = load_config(None, [ON, f"reward.model.path={tmp_path}"])
    assert shares_gpus(config) and not shares_gpus(_of_reward_model(config))


def test_a_lease_that_cannot_be_read_or_answered_for_a_moment_ends_nothing(made, lease, tmp_path, caplog):
    servers = made()
    servers.start()
    servers.wait_healthy()
    lease.write(Holder.TRAINER)
    holder = tmp_path / "run" / "lease" / "holder.json"
    whole = holder.read_text()
    holder.write_text("[]")
    assert servers.check() and "cannot be read" in caplog.text
    holder.write_text(whole)
    with mock.patch.object(LeaseFolder, "answer", side_effect=OSError(28, "No space left on device")):
        assert servers.check() and "cannot be answered" in caplog.text
    now = lease.write(Holder.MOVING, servers.urls)
    servers.check()
    assert lease.gone(now.turn) == set(servers.urls)


class ImaginedProcess:
    """In place of a server's process: dies when told to, and takes requests when told to."""

    all: list["ImaginedProcess"] = []
    started_for: list[Holder] = []
    holder = Holder.SERVERS

    def __init__(self, *_: object) -> None:
        self.pid, self.code, self.is_ready = 0, None, False
        ImaginedProcess.all.append(self)
        ImaginedProcess.started_for.append(ImaginedProcess.holder)

    def poll(self) -> int | None:
        return self.code

    def is_gone(self) -> bool:
        return self.code is not None

    def stop(self, grace_s: float) -> int:
        self.code = -9 if self.code is None else self.code
        return self.code

    def terminate(self) -> None:
        self.stop(0.0)

    def kill(self) -> None:
        self.stop(0.0)

    def pids(self) -> list[int]:
        return []

    def log_tail(self) -> str:
        return ""


class ImaginedFiles:
    def __init__(self, *_: object) -> None:
        self.variables: dict[str, str] = {}

    def note(self, pids: list[int]) -> None:
        pass

    def remove(self) -> None:
        pass


class ImaginedWatch:
    def __init__(self, *_: object) -> None:
        pass

    def failure(self) -> None:
        return None

    def stop(self) -> None:
        pass


NUM_SERVERS = 3
SERVER_NUMBERS = st.integers(0, NUM_SERVERS - 1)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.sampled_from(Holder), st.sets(SERVER_NUMBERS)),
        st.tuples(st.just("dies"), SERVER_NUMBERS),
        st.tuples(st.just("is ready"), SERVER_NUMBERS),
        st.tuples(st.just("look")),
    ),
    max_size=25,
)


def status_of(server: supervisor_module.SupervisedServer, check: HealthCheck, *_: object) -> int:
    if ImaginedProcess.holder is not Holder.SERVERS:
        assert check is HealthCheck.SCHEDULER_ANSWERS, "a sleeping server is asked for its health"
    return 200 if server.current.process.is_ready else 503


def check_events(events: Sequence[tuple]) -> None:
    """Live through the events: a server is started and asked with the lease alone, and answers name
    the gone alone."""
    ImaginedProcess.all, ImaginedProcess.started_for, ImaginedProcess.holder = [], [], Holder.SERVERS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        patch = mock.patch.object
        stand_ins = {"ChildProcess": ImaginedProcess, "ServerWatch": ImaginedWatch, "ServerFiles": ImaginedFiles}
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch(supervisor_module, name, stand_in))
        stack.enter_context(patch(supervisor_module, "MAX_BACKOFF_S", 0.0))
        stack.enter_context(patch(supervisor_module.SupervisedServer, "status_of", status_of))
        servers = supervisor(folder, "", f"num_servers={NUM_SERVERS}", "max_restarts=1000", overrides=[ON])
        lease = LeaseFolder(RunFolder(folder / "run").lease)
        servers.start()
        now = lease.read()
        for what, *arguments in events:
            processes = [server.current.process for server in servers._servers]
            if what == "lease":
                ImaginedProcess.holder = arguments[0]
                now = lease.write(arguments[0], [servers.urls[number] for number in arguments[1]])
            elif what == "dies":
                processes[arguments[0]].stop(0.0)
            elif what == "is ready":
                processes[arguments[0]].is_ready = True
            servers.check()
            alive = {server.url for server in servers._servers if not server.current.process.is_gone()}
            assert lease.gone(now.turn) == set(servers.urls) - alive
            if now.holder is Holder.SERVERS:
                assert alive == set(servers.urls), "it waits for nothing"
            else:
                states = {server.state for server in servers._servers}
                assert what != "lease" or alive.isdisjoint(now.condemned)
                assert StartState.STARTING not in states or now.holder is Holder.MOVING
        assert set(ImaginedProcess.started_for) == {Holder.SERVERS}
        servers.stop()


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_no_order_of_events_starts_or_asks_a_server_without_the_lease_and_answers_name_the_gone_alone(events):
    check_events(events)


MUTANTS = {
    "servers start without the lease": ("is_with_servers", property(lambda self: True)),
    "the lease does not condemn": ("look", lambda self: FOLLOWED.look(self) and set()),
    "starting servers hold memory beside the trainer": ("is_with_trainer", property(lambda self: False)),
}
EVENTFUL = [
    *[("is ready", number) for number in range(NUM_SERVERS - 1)],
    ("look",),
    ("lease", Holder.MOVING, {1}),
    ("lease", Holder.TRAINER, set()),
    ("dies", 0),
    ("look",),
    ("lease", Holder.SERVERS, set()),
]


@pytest.mark.parametrize("mutant", [None, *MUTANTS.values()], ids=["as it is", *MUTANTS])
def test_a_supervisor_that_breaks_a_rule_is_caught(monkeypatch, mutant):
    if mutant:
        monkeypatch.setattr(supervisor_module, "FollowedLease", type("Mutant", (FOLLOWED,), dict([mutant])))
    caught = pytest.raises(AssertionError) if mutant else nullcontext()
    with caught:
        check_events(EVENTFUL)
