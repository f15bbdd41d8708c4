"""The report of a folder of runs, of a run's attempts, and its sentences."""

import base64
import json
import os
import zlib
from pathlib import Path

import pytest

from megatron_dapo.agents.call_marks import CALL_MARKS
from megatron_dapo.commands.report.answers import StepFile
from megatron_dapo.commands.report.attempts import attempts_of
from megatron_dapo.commands.report.embedding import StepAnswers, fitting
from megatron_dapo.commands.report.page import summary
from megatron_dapo.commands.report.run_data import MAX_RUNS, read_run, runs_in
from megatron_dapo.commands.report.values import signed
from megatron_dapo.commands.report.watch import Watched
from megatron_dapo.common.ends import End, EndFolder, EndKind
from megatron_dapo.common.files import write_whole
from megatron_dapo.storage.run_folder import RunFolder
from tests.report_runs import START, write_run

pytestmark = pytest.mark.unit


def unpacked(packed: str) -> dict:
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_a_folder_of_runs_stands_for_its_newest_runs(tmp_path):
    """Neither other folders nor a run within a run count; a run itself stands for itself."""
    runs = [write_run(tmp_path / f"run_{number:02}", num_steps=1).path for number in range(MAX_RUNS + 2)]
    for age, run in enumerate(reversed(runs)):
        os.utime(RunFolder(run).metrics, (START - age, START - age))
    (tmp_path / "notes").mkdir()
    write_run(runs[-1] / "earlier_1", num_steps=1)
    assert runs_in([tmp_path]) == runs[2:]
    assert runs_in([runs[-1], tmp_path / "notes"]) == [runs[-1], tmp_path / "notes"]


def test_a_watched_folder_shows_runs_that_begin_later_and_reads_only_changed_ones(tmp_path, monkeypatch):
    first = write_run(tmp_path / "b", num_steps=1)
    watched = Watched([tmp_path])
    read = []
    monkeypatch.setattr(
        "megatron_dapo.commands.report.watch.read_run", lambda folder: read.append(folder.name) or read_run(folder)
    )
    assert [run["name"] for run in unpacked(watched.summary(watched.tag()))["runs"]] == ["b"]
    second = write_run(tmp_path / "a", num_steps=2)
    tag = watched.tag()
    runs = unpacked(watched.summary(tag))["runs"]
    assert [(run["name"], run["folder"]) for run in runs] == [("a", str(second.path)), ("b", str(first.path))]
    assert [run["at"] for run in runs] == [1, 0], "a page that has not heard of a yet asks for b"
    assert watched.tag() == tag and watched.answers("texts", 1, "trained", 2)
    assert watched.answers("texts", 0, "trained", 2) is None and watched.answers("texts", 2, "trained", 2) is None
    assert read == ["b", "a"]


def test_a_run_that_begins_while_a_summary_is_made_comes_with_the_next(tmp_path, monkeypatch):
    write_run(tmp_path / "b", num_steps=1)
    watched = Watched([tmp_path])

    def read_meanwhile(folder: Path):
        write_run(tmp_path / "a", num_steps=1)
        watched.tag()  # of another page
        return read_run(folder)

    monkeypatch.setattr("megatron_dapo.commands.report.watch.read_run", read_meanwhile)
    assert [run["name"] for run in unpacked(watched.summary(watched.tag()))["runs"]] == ["b"]
    assert [run["name"] for run in unpacked(watched.summary(watched.tag()))["runs"]] == ["a", "b"]


def write_logs(folder: Path, config: str | None = None, **logs: str) -> None:
    for name, text in logs.items():
        write_whole(folder / f"{name}.log", text)
    if config is not None:
        write_whole(folder / "config.yaml", config)


def test_an_attempt_tells_of_changed_keys_and_of_the_ends_of_its_logs(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    write_logs(run.logs / "attempt-9-0", "trainer: {seed: 1, note: x}", trainer="\x1b[31mred\x1b[0m\r\nfirst")
    write_logs(run.logs / "attempt-10-0", "trainer: {seed: 2, note: x}", trainer="a" * 100_000 + "the end\n")
    write_logs(run.logs / "attempt-10-1", "trainer: [", trainer="third")
    write_logs(run.logs / "attempt-11-0", "trainer: {seed: 2}", trainer="last")
    (run.logs / "attempt-11-0/servers.log").write_bytes(b"\xff \x1b[2K")
    (run.logs / "latest").symlink_to("attempt-11-0")
    attempts = attempts_of(run.path)
    assert [attempt["name"] for attempt in attempts] == [f"attempt-{name}" for name in ("11-0", "10-1", "10-0", "9-0")]
    changes = [attempt["changes"] for attempt in attempts]
    assert changes == [[["trainer.note", "x", ""]], [], [["trainer.seed", "1", "2"]], []]
    ends = [dict(attempt["logs"])["trainer"] for attempt in attempts]
    assert ends[:2] == ["last", "third"] and ends[3] == "red\nfirst"
    assert dict(attempts[0]["logs"])["servers"] == "\ufffd "
    assert ends[2].endswith("aathe end\n") and len(ends[2]) < 10_000


def test_logs_of_runs_without_slurm_and_damaged_ones_are_read_too(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    assert attempts_of(run.path) == []
    write_logs(run.logs, "a: 1", launch="started")
    os.mkfifo(run.logs / "pipe.log")
    (run.logs / "folder.log").mkdir()
    (run.logs / "none.log").symlink_to("nowhere")
    [attempt] = attempts_of(run.path)
    assert attempt["logs"] == [["folder", ""], ["launch", "started"], ["none", ""], ["pipe", ""]]


@pytest.mark.parametrize("victim", [EndKind.TERMINATED, EndKind.PEER_LOST, EndKind.KILLED])
def test_a_run_that_was_saved_on_request_did_not_fail(tmp_path, victim):
    """Its other ranks may end by the launcher's signal."""
    run = write_run(tmp_path / "run", num_steps=2)
    folder = EndFolder(run.ends, "1")
    folder.write("trainer-rank-0", End(EndKind.SAVED, 85, time=START + 100))
    folder.write("trainer-rank-1", End(victim, 143, time=START + 101))
    data = read_run(run.path)
    assert (data.state, data.sentence) == ("saved", "2 of 2 steps done; the run was asked to stop, and is saved")
    assert [event.kind for event in data.events if event.time > START + 99] == ["end"]


def test_the_end_of_a_saved_start_hides_no_failure_of_the_next_one(tmp_path):
    """A rank of the next start that left no record leaves the first one's."""
    run = write_run(tmp_path / "run", num_steps=2)
    for rank in (0, 1):
        EndFolder(run.ends, "1").write(f"trainer-rank-{rank}", End(EndKind.SAVED, 85, time=START + 100))
    EndFolder(run.ends, "2").write("trainer-rank-0", End(EndKind.KILLED, 137, "out of memory", time=START + 200))
    data = read_run(run.path)
    assert data.state == "failed" and "trainer-rank-0 ended (killed): out of memory" in data.sentence
    assert [event.kind for event in data.events if event.time > START + 199] == ["failure"]


def test_one_of_a_kind_has_no_plural(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    run.machine.write_text(json.dumps({"trainer_ranks": 1, "device": "cpu", "cpu": "a processor"}))
    data = read_run(run.path)
    assert dict(data.facts)["Trainer"] == "1 rank on a processor" and data.sentence == "1 of 1 step done"


@pytest.mark.parametrize(
    "text, said",
    [("-0.000", "0.000"), ("-0.5", "\u22120.5"), ("-0", "0"), ("0.0", "0.0"), ("-1e-05", "\u22121e\u221205")],
)
def test_a_minus_is_a_minus_and_zero_has_none(text, said):
    assert signed(text) == said


def test_twenty_thousand_steps_are_thinned_at_once():
    """Trying one number of steps after the other took a minute."""
    answers = [StepAnswers(StepFile("trained", step, Path()), 1, 1, "x" * (100 + step % 7)) for step in range(20_000)]
    kept = fitting(answers, 500_000)
    assert 400_000 < sum(len(each.texts) for each in kept) <= 500_000
    steps = [each.file.step for each in kept]
    gaps = {later - earlier for earlier, later in zip(steps, steps[1:], strict=False)}
    assert (steps[0], steps[-1]) == (0, 19_999) and max(gaps) - min(gaps) <= 1


def test_the_page_knows_the_marks_of_every_familys_calls(tmp_path):
    calls = summary([write_run(tmp_path / "run", num_steps=1).path])["calls"]
    assert {start for start, _ in calls} == {marks[0] for marks in CALL_MARKS.values()}
    assert ("<tool_call>", "</tool_call>") in calls and ("[TOOL_CALLS]", "") in calls
