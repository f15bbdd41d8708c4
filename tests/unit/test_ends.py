"""The end of a process is on record before it is gone; a failed write of it holds up no end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.common import ends
from megatron_dapo.common.ends import End, EndFolder, EndKind, end_of_code, end_of_error
from megatron_dapo.common.errors import MissingRanksError
from megatron_dapo.common.rollout_errors import ForeignSamples, RolloutError, ServersLost
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def test_a_record_is_read_as_it_was_written_by_those_of_the_same_start_only(tmp_path):
    end = End(EndKind.FAILED, 1, "ValueError: x", host="n1", step=3, time=5.0)
    EndFolder(tmp_path, "now").write("trainer-rank-0", end)
    record = EndFolder(tmp_path, "now").read("trainer-rank-0")
    assert (record.kind, record.exit_code, record.sentence, record.host, record.step) == (
        "failed",
        1,
        "ValueError: x",
        "n1",
        3,
    )
    assert EndFolder(tmp_path, "later").read("trainer-rank-0") is None
    assert EndFolder(tmp_path, "now").read("trainer-rank-1") is None
    assert {"kind", "exit_code", "sentence", "host", "step"} <= json.loads(
        (tmp_path / "trainer-rank-0.json").read_text()
    ).keys()


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [
        (0, EndKind.DONE, 0),
        (1, EndKind.FAILED, 1),
        (2, EndKind.USER_ERROR, 2),
        (14, EndKind.HANG, 14),
        (15, EndKind.MISMATCH, 15),
        (85, EndKind.SAVED, 85),
        (-9, EndKind.KILLED, 137),
        (-15, EndKind.TERMINATED, 143),
        (-35, EndKind.KILLED, 163),  # a signal without a name
    ],
)
def test_what_a_code_stands_for(code, kind, exit_code):
    end = end_of_code(code)
    assert (end.kind, end.exit_code) == (kind, exit_code)


def with_note(error: Exception) -> Exception:
    error.add_note("while doing x")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), EndKind.FAILED),
        (RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:1"), EndKind.PEER_LOST),
        (MissingRanksError("nobody came"), EndKind.PEER_LOST),
        (SystemExit(2), EndKind.USER_ERROR),
        (SystemExit("a word"), EndKind.FAILED),
        (with_note(RuntimeError("Connection closed by peer")), EndKind.PEER_LOST),
    ],
)
def test_what_an_error_stands_for(error, kind):
    assert end_of_error(error).kind is kind


def test_each_error_of_the_rollout_has_a_kind_of_its_own():
    kinds = {error: error("x").end_kind for error in (RolloutError, ServersLost, ForeignSamples)}
    assert kinds == {
        RolloutError: EndKind.ROLLOUT_FAILED,
        ServersLost: EndKind.SERVERS_LOST,
        ForeignSamples: EndKind.MISMATCH,
    }


PROCESS = """
import sys
from megatron_dapo.common import ends
from megatron_dapo.common.ends import EndFolder, EndKind
ends.begin("me", EndFolder(sys.argv[1], "now"))
print(EndFolder(sys.argv[1], "now").read("me"))
ends.begin_step(7)
ends.record_end(EndKind.HANG, 14, "first\\nwords")
ends.record_end(EndKind.FAILED, 1, "second words")
"""


def test_the_first_record_of_a_process_counts_and_the_one_of_its_last_life_goes(tmp_path):
    EndFolder(tmp_path, "now").write("me", End(EndKind.DONE, 0))
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    end = EndFolder(tmp_path, "now").read("me")
    assert (end.kind, end.sentence, end.step) == (EndKind.HANG, "first words", 7)


def test_a_disk_that_takes_no_record_holds_up_no_end(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", PROCESS.replace("print(", "(lambda *_: 0)("), str(tmp_path / "file" / "ends")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert "cannot be written" in done.stderr


TRAIN = """
import sys
import megatron_dapo.__main__ as program
program.main = lambda: {action}
program.ends.begin("trainer-rank-0", program.ends.EndFolder(sys.argv[1], ""))
program.run_and_end()
"""


@pytest.mark.parametrize(
    ("action", "kind", "code"),
    [("0", "done", 0), ("85", "saved", 85), ("1 / 0", "failed", 1), ("sys.exit(2)", "user_error", 2)],
)
def test_a_rank_records_any_end(tmp_path, action, kind, code):
    command = [sys.executable, "-c", TRAIN.format(action=action), str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    record = json.loads((Path(tmp_path) / "trainer-rank-0.json").read_text())
    assert (done.returncode, record["kind"], record["exit_code"]) == (code, kind, code)
    assert ends.rank_name(0) == "trainer-rank-0"
