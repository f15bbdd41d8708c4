"""How a job ended, read off the logs of its attempt: exit code, last line, requeue or not, and the first cause."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.slurm.outcome import Facts, outcome
from launch.slurm.plan import PREFLIGHT, SERVERS, TRAINER, Plan
from launch.slurm.progress import Progress, progress
from launch.torchrun import told
from megatron_dapo.checkpointing.folders import write_controller_state

pytestmark = pytest.mark.unit


class Attempt:
    """Folder of a job on two trainer nodes and two server nodes, that began after step 4."""

    def __init__(self, run: Path) -> None:
        self.run, self.logs = run, run / "logs" / "attempt-7-1"
        self.logs.mkdir(parents=True)
        self.plan = Plan(7, 1, ("t1", "t2"), ("s1", "s2"), 2, 1, str(run), str(self.logs), total_steps=40, start_step=4)
        self.saved(4)

    def saved(self, step: int) -> None:
        (self.run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)

    def sampled(self, step: int, *, closed: int, finished: int) -> None:
        """Groups of the next step, in gen batches that are done and in the open one."""
        queue = {"finished": [{}] * finished, "step": {"generated": {"num_groups": closed}}}
        write_controller_state(self.run / "checkpoints" / f"step_{step:06d}", {"queue": queue})

    def log(self, name: str, *lines: str) -> None:
        (self.logs / name).write_text("".join(f"{line}\n" for line in lines))

    def ended(self, role: str, **codes: int) -> None:
        (self.logs / "ends").mkdir(exist_ok=True)
        for node, code in codes.items():
            (self.logs / "ends" / f"{role}-{node}.json").write_text(json.dumps({"code": code, "time": 0}))

    def outcome(self, phase: str, exit_code: int, **facts):
        return outcome(self.plan, Facts(phase, exit_code, **facts))


@pytest.fixture
def attempt(tmp_path) -> Attempt:
    return Attempt(tmp_path)


def test_a_run_that_is_through_is_done(attempt):
    attempt.ended(TRAINER, t1=0, t2=0)
    attempt.saved(9)  # it need not have saved its last step
    ended = attempt.outcome(TRAINER, 0)
    assert (ended.code, ended.requeue) == (0, False) and ended.line == f"DONE: step 40 of 40 in {attempt.run}"


def test_a_run_that_was_asked_to_stop_by_slurm_is_saved_and_requeued(attempt):
    attempt.ended(TRAINER, t1=85, t2=85)
    attempt.saved(9)
    ended = attempt.outcome(TRAINER, 0, asked_by="USR1")
    assert (ended.code, ended.requeue) == (85, True)
    assert ended.line.startswith("SAVED: step 9 of 40") and "USR1, restart 2 of at most 20" in ended.line


@pytest.mark.parametrize("facts", [{"asked_by": ""}, {"asked_by": "USR1", "may_requeue": False}])
def test_a_user_s_stop_file_and_a_chain_of_jobs_requeue_nothing(attempt, facts):
    attempt.ended(TRAINER, t1=85)
    attempt.saved(9)
    ended = attempt.outcome(TRAINER, 0, **facts)
    assert (ended.code, ended.requeue) == (85, False) and "goes on from there" in ended.line


def test_an_attempt_that_gained_no_step_is_not_repeated(attempt):
    attempt.ended(TRAINER, t1=85)
    ended = attempt.outcome(TRAINER, 0, asked_by="USR1")
    assert (ended.code, ended.requeue) == (13, False) and "nothing was gained" in ended.line


def test_an_attempt_that_was_stopped_while_it_sampled_goes_on_with_its_groups(attempt):
    """The step before is the newest checkpoint, as when the attempt began."""
    attempt.ended(TRAINER, t1=85)
    attempt.sampled(4, closed=8, finished=3)
    ended = attempt.outcome(TRAINER, 0, asked_by="USR1")
    assert (ended.code, ended.requeue) == (85, True)
    assert "step 4 of 40, and 11 groups of the next one, is saved" in ended.line
    attempt.plan = replace(attempt.plan, start_groups=11)  # as the next attempt is planned, which gains none
    assert attempt.outcome(TRAINER, 0, asked_by="USR1").code == 13


def test_a_preempted_attempt_is_repeated_though_it_had_no_time_to_gain_anything(attempt):
    attempt.ended(TRAINER, t1=85)
    ended = attempt.outcome(TRAINER, 0, asked_by="TERM")
    assert (ended.code, ended.requeue) == (85, True)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"no json"), gzip.compress(b'{"replay": "dir"}')],
    ids=["empty", "no gzip", "no json", "a replay"],
)
def test_a_checkpoint_that_tells_of_no_groups_counts_by_its_step(attempt, content):
    (attempt.run / "checkpoints" / "step_000004" / "controller.json.gz").write_bytes(content)
    assert progress(str(attempt.run)) == Progress(4, 0)


def test_a_job_is_requeued_at_most_so_often(attempt):
    attempt.ended(TRAINER, t1=85)
    attempt.saved(9)
    ended = attempt.outcome(TRAINER, 0, asked_by="USR1", max_restarts=1)
    assert (ended.code, ended.requeue) == (13, False) and "requeued 1 times, and MAX_RESTARTS is 1" in ended.line


def test_the_rank_that_died_is_blamed_not_the_one_that_lost_its_peer(attempt):
    attempt.log(
        "trainer-t1.log",
        *("some table of torchrun", "rank 0 on t1 ended with exit code 1 at 2026-11-21T10:00:05"),
    )
    attempt.log("trainer-t2.log", "rank 3 on t2 was killed by SIGKILL at 2026-11-21T10:00:05")
    attempt.log("trainer-rank-0.log", "Traceback ...", "RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1")
    attempt.ended(TRAINER, t1=1, t2=137)
    ended = attempt.outcome(TRAINER, 137)
    assert ended.code == 12
    assert ended.line == f"FAILED (12): rank 3 on t2 was killed by SIGKILL; see {attempt.logs}/trainer-rank-3.log"


def test_the_first_of_several_errors_is_told_in_its_own_words(attempt):
    for node, rank, second in (("t1", 1, "09"), ("t2", 2, "07")):
        attempt.log(f"trainer-{node}.log", f"rank {rank} on {node} ended with exit code 1 at 2026-11-21T10:00:{second}")
        attempt.log(
            f"trainer-rank-{rank}.log",
            *(f"[rank{rank}]: torch.OutOfMemoryError: {rank} GiB", "[rank0]: Warning: not destroyed"),
        )
    ended = attempt.outcome(TRAINER, 1)
    assert "rank 2 on t2 ended with exit code 1: torch.OutOfMemoryError: 2 GiB; see" in ended.line


def test_a_hang_is_told_in_the_words_of_the_watchdog(attempt):
    said = "Hang: rank 0 made no progress for 60 s in `update` of step 3; missing: rank 2 (process 5 on t2)"
    for node, rank in (("t2", 3), ("t1", 0)):
        attempt.log(f"trainer-{node}.log", f"rank {rank} on {node} ended with exit code 14 at 2026-11-21T10:00:05")
        attempt.log(f"trainer-rank-{rank}.log", "RuntimeError: Connection closed by peer", f"{said}, says {rank}")
    assert f"rank 0 on t1 ended with exit code 14: {said}, says 0; see" in attempt.outcome(TRAINER, 14).line


def test_the_launcher_s_words_on_a_failed_rank_are_those_that_are_looked_for(attempt, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "t2")
    attempt.log("trainer-t2.log", told((3, SimpleNamespace(exitcode=-9, timestamp=1.8e9))))
    assert "rank 3 on t2 was killed by SIGKILL; see" in attempt.outcome(TRAINER, 137).line


def test_a_mistake_of_the_user_has_its_own_exit_code_and_sentence(attempt):
    attempt.log("trainer-rank-0.log", "1 mistake to correct:", "trainer.resume is required, but there is none.")
    attempt.ended(TRAINER, t1=2)
    ended = attempt.outcome(TRAINER, 137)
    assert ended.code == 2 and ended.line.startswith("FAILED (2): trainer.resume is required")


def test_servers_that_ended_are_blamed_before_the_trainer(attempt):
    attempt.log("servers-s1.log", "2026 ERROR ...")
    attempt.log(
        "servers-s2.log",
        *(
            "The servers failed: server-s2-0 at http://s2:1 was not healthy within 5 s; its log is X",
            "  | ImportError: y",
        ),
    )
    attempt.log("trainer-t1.log", "rank 0 on t1 ended with exit code 1 at 2026-11-21T10:00:05")
    attempt.ended(TRAINER, t1=1)
    ended = attempt.outcome(TRAINER, 1, servers_ended=True)
    assert ended.code == 11
    assert "s2: server-s2-0 at http://s2:1 was not healthy within 5 s; its log is X (ImportError: y)" in ended.line


def test_servers_that_all_hang_are_the_cause_too(attempt):
    attempt.log("trainer-t1.log", "rank 0 on t1 ended with exit code 1 at 2026-11-21T10:00:05")
    said = "The rollout failed: all SGLang servers have been down for 9 s (...): http://s1:1; see their log files."
    attempt.log("trainer-rank-0.log", said, "a warning at the exit")
    ended = attempt.outcome(TRAINER, 1)
    assert ended.code == 11 and f"rank 0 on t1 ended with exit code 1: {said}" in ended.line


def test_servers_that_are_never_healthy_are_named(attempt):
    attempt.log("waiting.log", "not healthy within 60 s: http://s1:1")
    ended = attempt.outcome(SERVERS, 1)
    assert ended.code == 11 and "not healthy within 60 s: http://s1:1; their logs are" in ended.line


def test_the_preflight_s_verdict_is_the_cause(attempt):
    attempt.log("preflight-t1.log", "a table", "preflight: s1: has 3 GPUs, 8 are needed; drain it")
    attempt.log("preflight-s1.log", "preflight: s1: has 3 GPUs, 8 are needed; drain it")
    ended = attempt.outcome(PREFLIGHT, 1)
    assert ended.code == 10 and ended.line.startswith("FAILED (10): preflight: s1: has 3 GPUs")


def test_where_no_program_could_tell_slurm_is_quoted(attempt):
    attempt.log("srun-trainer.log", "srun: error: Node failure on t2")
    assert attempt.outcome(TRAINER, 1).line.startswith("FAILED (12): trainer: srun: error: Node failure on t2")


def test_where_nobody_said_anything_the_logs_are_named(attempt):
    assert f"{attempt.logs}/trainer-*.log" in attempt.outcome(TRAINER, 1).line
    attempt.log("trainer-t2.log", "Killed")
    attempt.ended(TRAINER, t2=137)
    assert "trainer on t2 ended with exit code 137: Killed" in attempt.outcome(TRAINER, 137).line


def test_the_line_is_one_line_of_bounded_length(attempt):
    attempt.log("trainer-t1.log", "rank 0 on t1 ended with exit code 1 at 2026-11-21T10:00:05")
    attempt.log("trainer-rank-0.log", f"ValueError: {'x ' * 2000}")
    line = attempt.outcome(TRAINER, 1).line
    assert len(line) <= 600 and "\n" not in line


def test_a_node_that_does_not_see_the_folder_is_blamed_before_those_who_wait_for_it(attempt):
    attempt.log("srun-preflight.log", "srun: error: task 2 launch failed: Slurmd could not connect IO")
    attempt.log("preflight-t1.log", "preflight: s1: not heard of within 120 s")
    ended = attempt.outcome(PREFLIGHT, 1)
    assert ended.code == 10 and ended.line.startswith("FAILED (10): s1: Slurm could not start the preflight task: ")
    assert ended.line.endswith(f"; is {attempt.logs} the same folder there as on t1?")
