"""A job with a hung rank ends by itself, names rank and place, and leaves the survivors' stacks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.common.exit_codes import HANG_EXIT_CODE
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.distributed

WORKER = "tests/distributed/hang_worker.py"


@pytest.fixture(scope="module")
def hangs(tmp_path_factory) -> tuple[Path, dict[str, list[int | None]]]:
    """The folder of all jobs, and the exit codes of their ranks; None: a rank had to be killed."""
    folder = tmp_path_factory.mktemp("hangs")
    command = [sys.executable, WORKER, str(folder)]
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def read(hangs, job: str, file: str) -> str:
    return (hangs[0] / job.replace(" ", "-") / file).read_text()


def written(hangs, job: str) -> set[str]:
    return {path.name for path in (hangs[0] / job.replace(" ", "-") / "hang").glob("*")}


def test_a_rank_that_sleeps_is_named_with_its_phase_and_line(hangs):
    job = "rank 1 sleeps in update"
    assert hangs[1][job] == [HANG_EXIT_CODE, HANG_EXIT_CODE]
    for rank in range(2):
        said = read(hangs, job, f"rank-{rank}.log").splitlines()[-1]
        assert said.startswith("Hang: ") and "no progress for 5 s" in said
        missing = said.partition("missing: ")[2]
        assert missing.startswith("rank 1 ") and "is in `update` of step 3 at " + WORKER in missing
        assert "rank 0" not in missing


def test_a_rank_that_never_comes_to_the_phase_of_the_others_is_named(hangs):
    job = "rank 0 sleeps in rollout"
    assert hangs[1][job] == [HANG_EXIT_CODE, HANG_EXIT_CODE]
    missing = read(hangs, job, "rank-1.log").partition("missing: ")[2]
    assert missing.startswith("rank 0 ") and "is in `rollout` of step 3" in missing


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_with_its_last_known_position(hangs, rank):
    """Of rank 0 the store stops too, the ranks' means to hear of each other."""
    job, other = f"rank {rank} is stopped", 1 - rank
    assert hangs[1][job][other] == HANG_EXIT_CODE and hangs[1][job][rank] is None
    missing = read(hangs, job, f"rank-{other}.log").partition("missing: ")[2]
    # it is told once a second; the second step's phase lasts longer
    assert re.match(
        rf"rank {rank} \(process \d+ on \S+\) does not answer, last in (`\w+` of|no phase, after) step [23]", missing
    )
    assert written(hangs, job) == {f"rank-{other}.txt", f"flight-gloo-rank-{other}.json"}


def test_the_stacks_and_the_flight_record_show_who_waits_and_who_does_not(hangs):
    job = "rank 1 sleeps in update"
    assert written(hangs, job) == {f"{name}.{end}" for name, end in FILES}
    assert "in all_reduce" in read(hangs, job, "hang/rank-0.txt")
    sleeper = read(hangs, job, "hang/rank-1.txt")
    assert "in sleep_in_update" in sleeper and "in all_reduce" not in sleeper
    counts = [len(json.loads(read(hangs, job, f"hang/flight-gloo-rank-{rank}.json"))["entries"]) for rank in range(2)]
    assert counts[0] == counts[1] + 1  # rank 1 did not come to this all-reduce


def test_storage_that_hangs_keeps_no_rank_from_ending_and_saying_who_is_missing(hangs):
    """Ranks waiting for their files answer all the same: none is taken for the missing one."""
    job = "no file is written"
    assert hangs[1][job] == [HANG_EXIT_CODE, HANG_EXIT_CODE]
    for rank in range(2):
        *_, before, said = read(hangs, job, f"rank-{rank}.log").splitlines()
        assert before.endswith("took no stacks within 8 s.")
        missing = said.partition("missing: ")[2]
        assert missing.startswith("rank 1 ") and "is in `update` of step 3 at " + WORKER in missing
        assert "rank 0" not in missing


def test_a_checkpoint_whose_writer_never_ends_is_waited_for_no_longer_than_a_phase_may_take(hangs):
    """At the next save, at a stop or at the end of the run: the rank without files is named."""
    job = "rank 1 writes for ever"
    assert hangs[1][job] == [HANG_EXIT_CODE, HANG_EXIT_CODE]
    for rank in range(2):
        lines = read(hangs, job, f"rank-{rank}.log").splitlines()
        # torch may tell of the first rank to end
        said = [line for line in lines if line.startswith("Hang: ")][-1]
        assert "no progress for 10 s in `checkpoint` of step 3" in said
        missing = said.partition("missing: ")[2]
        place = "is in `checkpoint` of step 3 at megatron_dapo/checkpointing/pending_save.py:"
        assert missing.startswith("rank 1 ") and place in missing and "rank 0" not in missing


FILES = [("rank-0", "txt"), ("rank-1", "txt"), ("flight-gloo-rank-0", "json"), ("flight-gloo-rank-1", "json")]


def test_the_last_words_are_spoken_by_every_rank_that_lives(hangs):
    """In the trainer: the controller's stacks are asked for."""
    alarms = {
        job: [rank for rank in range(2) if (hangs[0] / job.replace(" ", "-") / f"alarm-{rank}").exists()]
        for job in hangs[1]
    }
    assert alarms == {
        "rank 1 sleeps in update": [0, 1],
        "rank 0 sleeps in rollout": [0, 1],
        "rank 1 is stopped": [0],
        "rank 0 is stopped": [1],
        "no file is written": [0, 1],
        "rank 1 writes for ever": [0, 1],
        "nobody hangs": [],
    }


def test_a_rank_that_leaves_early_is_no_hang(hangs):
    assert hangs[1]["nobody hangs"] == [0, 0]
    assert not written(hangs, "nobody hangs")
    assert [read(hangs, "nobody hangs", f"rank-{rank}.log") for rank in range(2)] == ["", ""]
