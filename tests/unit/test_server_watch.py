"""Servers alive but no longer working; stand-ins answer as a file tells them to."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dapo.servers import server_watch
from megatron_dapo.servers.server_watch import report_unresponsive
from megatron_dapo.servers.supervisor import ServerSupervisor
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
