"""Servers alive but no longer working; stand-ins answer as a file tells them to."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_dapo.servers import server_watch
from megatron_dapo.servers.followed_lease import turn_awake
from megatron_dapo.servers.server_health import HealthCheck
from megatron_dapo.servers.server_watch import ServerWatch, report_unresponsive
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from tests.unit.test_supervisor import eventually, supervisor

pytestmark = pytest.mark.unit

AT_WORK = {"/server_info": 200, "/ready": 200, "/health_generate": 200}
STUCK = AT_WORK | {"/server_info": None}
ILL = AT_WORK | {"/health_generate": 503}
PAUSED = AT_WORK | {"/ready": 503, "/health_generate": 503}
AN_HOUR = "weight_sync.timeout_s=3600.0"


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    times = {"POLL_INTERVAL_S": 0.05, "ASK_INTERVAL_S": 0.1, "ANSWER_S": 0.8, "HEALTH_ANSWER_S": 0.8}
    times |= {"SUSPECT_LIMIT_S": 1.5, "GENERATE_LIMIT_S": 1.5}
    for name, value in times.items():
        monkeypatch.setattr(server_watch, name, value)
    monkeypatch.setattr("megatron_dapo.servers.supervisor.POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr("megatron_dapo.servers.supervisor.PUSH_MARGIN_S", 0.0)


@pytest.fixture
def answer(tmp_path) -> Callable[[dict], None]:
    """Sets the server's answers from now on."""

    def set_to(answers: dict) -> None:
        (tmp_path / "new").write_text(json.dumps(answers))
        (tmp_path / "new").replace(tmp_path / "answers.json")

    set_to(AT_WORK)
    return set_to


@pytest.fixture
def started(tmp_path, answer) -> Iterator[Callable[..., ServerSupervisor]]:
    """A supervisor with one healthy server."""
    made = []

    def start(*overrides: str) -> ServerSupervisor:
        made.append(supervisor(tmp_path, f"answers {tmp_path / 'answers.json'}", overrides=overrides))
        made[0].start()
        made[0].wait_healthy()
        return made[0]

    yield start
    for servers in made:
        servers.stop()


def is_restarted(servers: ServerSupervisor, answer: Callable[[dict], None]) -> bool:
    """Whether another process serves at the URL within a while, from when it answers again."""
    (before,) = servers.pids()
    if not eventually(lambda: not servers.check(), timeout_s=20):
        return False
    answer(AT_WORK)
    return eventually(servers.check, timeout_s=20) and servers.pids() != [before] and not psutil.pid_exists(before)


def test_a_server_whose_scheduler_is_silent_for_longer_than_a_push_may_take_is_started_again(started, answer, caplog):
    servers = started("weight_sync.timeout_s=1.0")
    answer(STUCK)
    assert is_restarted(servers, answer)
    assert "has not answered /server_info for" in caplog.text and "restart 1 of 3" in caplog.text


def test_a_server_that_generates_nothing_is_started_again(started, answer, caplog):
    """As after its detokenizer was lost: everything else answers."""
    servers = started(AN_HOUR)
    answer(ILL)
    assert is_restarted(servers, answer)
    assert "has not answered /health_generate for" in caplog.text


def test_a_paused_server_need_not_generate(started, answer):
    servers = started(AN_HOUR)
    answer(PAUSED)
    assert not eventually(lambda: not servers.check(), timeout_s=1.5)


def test_one_that_a_push_left_out_is_started_again_at_once_if_it_does_not_answer(started, answer, tmp_path):
    """It may be stuck in a collective with a dead one for half an hour. A silent scheduler
    otherwise has the time of a push."""
    servers, run = started(AN_HOUR), RunFolder(tmp_path / "run")
    answer(STUCK)
    assert not eventually(lambda: not servers.check(), timeout_s=1.5), "a push may be under way"
    report_unresponsive(run, {servers.urls[0]: "join (stage 0): no answer to the request"})
    assert is_restarted(servers, answer)
    assert eventually(lambda: not list((run.path / "unresponsive_servers").iterdir()))


def test_one_that_a_push_left_out_and_that_answers_is_left_alone(started, tmp_path):
    servers, run = started(AN_HOUR), RunFolder(tmp_path / "run")
    before = servers.pids()
    report_unresponsive(run, {servers.urls[0]: "any", "http://elsewhere:1": "another supervisor's"})
    assert eventually(lambda: not run.unresponsive(servers.urls[0]).exists())
    assert not eventually(lambda: not servers.check(), timeout_s=1.5) and servers.pids() == before
    assert run.unresponsive("http://elsewhere:1").exists()


def test_one_that_a_push_left_out_must_also_generate_once_it_goes_on(started, answer, tmp_path, monkeypatch, caplog):
    """While it is paused its scheduler may answer, though its GPUs wait for a dead member
    of the group."""
    monkeypatch.setattr(server_watch, "GENERATE_LIMIT_S", 3600.0)
    servers, run = started(AN_HOUR), RunFolder(tmp_path / "run")
    answer(PAUSED)
    report_unresponsive(run, {servers.urls[0]: "any"})
    assert not eventually(lambda: not servers.check(), timeout_s=1.5) and run.unresponsive(servers.urls[0]).exists()
    answer(ILL)
    assert is_restarted(servers, answer)
    assert "has not answered /health_generate for" in caplog.text


def test_notes_that_cannot_be_written_are_no_failure_of_the_trainer(tmp_path, caplog):
    report_unresponsive(RunFolder(Path("/dev/null/run")), {"http://a:1": "any"})
    assert "http://a:1 does not answer, and its supervisor cannot be told" in caplog.text


class AskedServer:
    """A server's health on paper; a question can be held before its answer."""

    def __init__(self, lease: LeaseFolder, note: Path) -> None:
        self.answers = dict(AT_WORK)
        self.num_asked = 0
        self._may_answer, self._is_held = True, False
        self._changed = threading.Condition()
        self.watch = ServerWatch(self._status_of, 1.0, note, lease)

    def _status_of(self, check: HealthCheck, timeout_s: float) -> int | None:
        with self._changed:
            self.num_asked += 1
            self._is_held = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._may_answer, 60)
            self._is_held = False
            self._changed.notify_all()
        return self.answers[check]

    def hold(self) -> None:
        """Wait for the next question, and hold it."""
        with self._changed:
            self._may_answer = False
            assert self._changed.wait_for(lambda: self._is_held, 60)

    def let_go(self) -> None:
        """Answer the question, and the following ones."""
        with self._changed:
            before, self._may_answer = self.num_asked, True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._is_held or self.num_asked > before, 60)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The watches' time; they ask at every look."""
    made = SimpleNamespace(now=0.0, monotonic=lambda: made.now)
    monkeypatch.setattr(server_watch, "time", made)
    for name, value in (("ASK_INTERVAL_S", 0.0), ("POLL_INTERVAL_S", 0.001)):
        monkeypatch.setattr(server_watch, name, value)
    return made


@pytest.fixture
def lease(tmp_path) -> LeaseFolder:
    return LeaseFolder(RunFolder(tmp_path / "run").lease)


@pytest.fixture
def asked(lease, tmp_path, clock) -> Iterator[AskedServer]:
    server = AskedServer(lease, tmp_path / "note")
    yield server
    server.watch.stop()
    server.let_go()


def looks(monkeypatch, number: int) -> None:
    """Wait until the watch has looked that often at the lease."""
    done = threading.Semaphore(0)

    def look(lease):
        done.release()
        return turn_awake(lease)

    with monkeypatch.context() as patched:
        patched.setattr(server_watch, "turn_awake", look)
        for _ in range(number):
            assert done.acquire(timeout=60)


def test_a_sleeping_server_is_asked_nothing_though_others_call_it_suspect(asked, lease, tmp_path, monkeypatch):
    asked.hold()
    asked.let_go()
    lease.write(Holder.MOVING)
    looks(monkeypatch, 3)  # a question may have been under way
    (tmp_path / "note").write_text("any")
    before = asked.num_asked
    for holder in (Holder.MOVING, Holder.TRAINER):
        lease.write(holder)
        looks(monkeypatch, 20)
    assert asked.num_asked == before and asked.watch.failure() is None
    lease.write(Holder.SERVERS)
    asked.hold()


def test_a_question_that_straddles_the_sleep_counts_for_nothing(asked, lease, clock, monkeypatch):
    """Begun awake, it goes unanswered since the server was put to sleep."""
    monkeypatch.setattr(server_watch, "MIN_MISSES", 1)
    asked.answers = dict(STUCK)
    asked.hold()
    lease.write(Holder.MOVING)
    lease.write(Holder.SERVERS)
    clock.now = 100.0  # beyond every limit
    asked.let_go()
    asked.hold()  # one of those after waking
    assert asked.watch.failure() is None


def test_no_further_question_of_a_look_reaches_a_server_that_fell_asleep(asked, lease, monkeypatch):
    asked.hold()
    before = asked.num_asked
    lease.write(Holder.MOVING)
    asked.let_go()
    looks(monkeypatch, 20)
    assert asked.num_asked == before


def test_misses_before_a_sleep_are_forgotten_and_a_server_that_does_not_work_afterwards_is_found(asked, lease, clock):
    asked.answers = dict(STUCK)
    asked.hold()
    asked.let_go()
    clock.now = 50.0
    assert eventually(lambda: asked.watch.failure() is not None)
    lease.write(Holder.TRAINER)
    assert asked.watch.failure() is None
    clock.now = 1000.0
    lease.write(Holder.SERVERS)
    for _ in range(2):
        assert asked.watch.failure() is None, "its clock starts anew"
        asked.hold()
        asked.let_go()
    clock.now = 1002.0
    assert eventually(lambda: asked.watch.failure() == "has not answered /server_info for 2 s")


def test_an_awake_server_that_stays_paused_is_found_and_not_asked_to_generate(asked, clock):
    """Pushes come while it sleeps: this one was forgotten."""
    asked.answers = PAUSED | {"/health_generate": None}
    asked.hold()
    asked.let_go()
    clock.now = 10.0
    assert eventually(lambda: asked.watch.failure() == "has not answered /ready for 10 s")
