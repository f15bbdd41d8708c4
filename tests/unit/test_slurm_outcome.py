"""The end of a job from its processes' records: exit code, last line, requeue or not,
first cause."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.process_names import WAITING, preflight_name, supervisor_name, task_name
from launch.slurm.outcome import Facts, outcome
from launch.slurm.plan import PREFLIGHT, SERVERS, TRAINER, JobPlan
from launch.slurm.progress import Progress, progress
from launch.torchrun import _record_end
from megatron_dapo.checkpointing.folders import CONTROLLER_STATE, write_controller_state
from megatron_dapo.checkpointing.state_file import to_bytes
from megatron_dapo.common.ends import End, EndKind, end_of_code, rank_name
from megatron_dapo.data.samples import Group, PartialResponse
from megatron_dapo.queue.plain_data import draw_to_plain
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit


class Attempt:
    """Folder of a job on two trainer nodes and two server nodes, that began after step 4."""

    def __init__(self, run: Path) -> None:
        self.run, self.logs = run, run / "logs" / "attempt-7-1"
        self.logs.mkdir(parents=True)
        self.plan = JobPlan(
            7, 1, ("t1", "t2"), ("s1", "s2"), 2, 1, str(run), str(self.logs), total_steps=40, start_step=4
        )
        self.saved(4)

    def saved(self, step: int) -> None:
        (self.run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)

    def sampled(self, step: int, *, closed: int, finished: int, unfinished: Sequence[Group] = ()) -> None:
        """Groups of the next step, in gen batches that are done and in the open one."""
        open_draws = [{"uid": "a"}] * finished + [draw_to_plain(group) for group in unfinished]
        queue = {"finished": [{}] * finished, "open": open_draws, "step": {"generated": {"num_groups": closed}}}
        write_controller_state(self.run / "checkpoints" / f"step_{step:06d}", {"queue": queue})

    def log(self, name: str, *lines: str) -> None:
        (self.logs / name).write_text("".join(f"{line}\n" for line in lines))

    def ended(self, role: str, **codes: int) -> None:
        """Exit codes of the role's tasks, by node; negative: the number of the signal."""
        for node, code in codes.items():
            self.plan.ends.write(task_name(role, node), end_of_code(code))

    def process_ended(self, who: str, kind: EndKind, code: int, sentence: str = "", host: str = "t1", time: float = 0):
        self.plan.ends.write(who, End(kind, code, sentence, host, step=5, time=time))

    def rank_ended(self, rank: int, *args, **fields) -> None:
        self.process_ended(rank_name(rank), *args, **fields)

    def outcome(self, phase: str, exit_code: int, **facts):
        return outcome(self.plan, Facts(phase, exit_code, **facts))


@pytest.fixture
def attempt(tmp_path) -> Attempt:
    return Attempt(tmp_path)


def test_a_finished_run_is_done(attempt):
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
    assert (ended.code, ended.requeue) == (85, False) and "resumes it" in ended.line


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
    # as the next attempt is planned, which gains none
    attempt.plan = replace(attempt.plan, start_groups=11)
    assert attempt.outcome(TRAINER, 0, asked_by="USR1").code == 13


@pytest.mark.parametrize("gained", ["a sample", "a part of one", "a replayed sample"])
def test_an_attempt_that_gained_responses_of_unfinished_groups_goes_on(attempt, gained):
    """A long step may be stopped before its first group is finished.
    A replayed sample is no gain."""
    (group,) = synthetic_groups(64, num_groups=1, n=1)
    (sample,) = group.samples
    kept = {
        "a sample": replace(group, samples=(sample,)),
        "a part of one": replace(group, samples=(), partials=(PartialResponse((1, 2), (-0.1, -0.2), (0, 0), ("u",)),)),
        "a replayed sample": replace(group, samples=(replace(sample, exp_mask=True),)),
    }[gained]
    attempt.ended(TRAINER, t1=85)
    attempt.sampled(4, closed=0, finished=0, unfinished=[kept])
    reached = progress(str(attempt.run))
    number = {"a sample": sample.num_response_tokens, "a part of one": 2, "a replayed sample": 0}[gained]
    assert reached == Progress(4, 0, number)
    assert attempt.outcome(TRAINER, 0, asked_by="USR1").requeue == (number > 0)
    # as the next attempt is planned, which gains none
    attempt.plan = replace(attempt.plan, start_tokens=number)
    assert attempt.outcome(TRAINER, 0, asked_by="USR1").code == 13


def test_a_preempted_attempt_is_repeated_though_it_had_no_time_to_gain_anything(attempt):
    attempt.ended(TRAINER, t1=85)
    ended = attempt.outcome(TRAINER, 0, asked_by="TERM")
    assert (ended.code, ended.requeue) == (85, True)


@pytest.mark.parametrize(
    "content",
    [b"", b"no tensors", to_bytes({"replay": "dir"})],
    ids=["empty", "no tensors", "a replay"],
)
def test_a_checkpoint_that_tells_of_no_groups_counts_by_its_step(attempt, content):
    (attempt.run / "checkpoints" / "step_000004" / CONTROLLER_STATE).write_bytes(content)
    assert progress(str(attempt.run)) == Progress(4, 0)


def test_a_job_is_requeued_at_most_so_often(attempt):
    attempt.ended(TRAINER, t1=85)
    attempt.saved(9)
    attempt.plan = replace(attempt.plan, max_restarts=1)
    ended = attempt.outcome(TRAINER, 0, asked_by="USR1")
    assert (ended.code, ended.requeue) == (13, False) and "requeued 1 times, and MAX_RESTARTS is 1" in ended.line


def test_the_dead_rank_is_blamed_not_its_peer(attempt):
    said = "RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1"
    attempt.rank_ended(0, EndKind.PEER_LOST, 1, said, time=4)
    attempt.rank_ended(3, EndKind.KILLED, 137, "was killed by SIGKILL", host="t2", time=5)
    attempt.ended(TRAINER, t1=1, t2=-9)
    ended = attempt.outcome(TRAINER, 137)
    assert ended.code == 12
    assert ended.line == f"FAILED (12): rank 3 on t2 was killed by SIGKILL; see {attempt.logs}/trainer-rank-3.log"


def test_the_first_of_several_errors_is_quoted(attempt):
    for node, rank, second in (("t1", 1, 9), ("t2", 2, 7)):
        said = f"torch.OutOfMemoryError: {rank} GiB"
        attempt.rank_ended(rank, EndKind.FAILED, 1, said, host=node, time=second)
    ended = attempt.outcome(TRAINER, 1)
    assert "rank 2 on t2 ended with exit code 1: torch.OutOfMemoryError: 2 GiB; see" in ended.line


def test_a_hang_is_reported_in_the_words_of_rank_0_which_ends_last(attempt):
    said = "Hang: rank 0 made no progress for 60 s in `update` of step 3; missing: rank 2 (process 5 on t2)"
    for node, rank in (("t2", 3), ("t1", 0)):
        attempt.rank_ended(rank, EndKind.HANG, 14, f"{said}, says {rank}", host=node, time=-rank)
    assert f"rank 0 on t1 ended with exit code 14: {said}, says 0; see" in attempt.outcome(TRAINER, 14).line


def test_the_launcher_records_the_end_of_a_rank_that_could_not(attempt, monkeypatch):
    """And leaves an existing record."""
    monkeypatch.setenv("SLURMD_NODENAME", "t2")
    for name, value in attempt.plan.ends.variables().items():
        monkeypatch.setenv(name, value)
    attempt.rank_ended(2, EndKind.PEER_LOST, 1, "RuntimeError: Connection closed by peer", host="t2")
    for rank, code in ((2, 1), (3, -9)):
        _record_end((rank, SimpleNamespace(exitcode=code, timestamp=1.8e9)))
    assert "rank 3 on t2 was killed by SIGKILL; see" in attempt.outcome(TRAINER, 137).line
    assert attempt.plan.ends.read(rank_name(2)).kind is EndKind.PEER_LOST


def test_the_log_is_read_of_a_rank_that_ended_before_it_could_tell(attempt):
    attempt.log("trainer-rank-3.log", "Fatal Python error: _PyMem_DebugMalloc", "a warning at the exit")
    attempt.rank_ended(3, EndKind.FAILED, 1, host="t2")
    words = "rank 3 on t2 ended with exit code 1: Fatal Python error: _PyMem_DebugMalloc; see"
    assert words in attempt.outcome(TRAINER, 1).line


def test_ends_of_an_earlier_start_of_the_run_are_not_taken_for_those_of_this_one(attempt):
    before = replace(attempt.plan, logs=str(attempt.run / "logs" / "attempt-7-0"))
    before.ends.write(task_name(TRAINER, "t1"), end_of_code(85))
    before.ends.write(rank_name(0), End(EndKind.USER_ERROR, 2, "a mistake of then"))
    ended = attempt.outcome(TRAINER, 1)
    assert ended.code == 12 and "trainer ended without a word" in ended.line


def test_a_mistake_of_the_user_has_its_own_exit_code_and_sentence(attempt):
    attempt.rank_ended(0, EndKind.USER_ERROR, 2, "trainer.resume is required, but there is none.")
    attempt.ended(TRAINER, t1=2)
    ended = attempt.outcome(TRAINER, 137)
    assert ended.code == 2 and ended.line.startswith("FAILED (2): trainer.resume is required")


def test_servers_that_ended_are_blamed_before_the_trainer(attempt):
    said = "server-s2-0 at http://s2:1 was not healthy within 5 s; its log is X (ImportError: y)"
    attempt.process_ended(supervisor_name("s1"), EndKind.DONE, 0)
    attempt.process_ended(supervisor_name("s2"), EndKind.FAILED, 1, said, host="s2")
    attempt.rank_ended(0, EndKind.FAILED, 1, "ValueError")
    attempt.ended(TRAINER, t1=1)
    ended = attempt.outcome(TRAINER, 1, servers_ended=True)
    assert ended.code == 11
    assert f"s2: {said}" in ended.line


def test_servers_that_all_hang_are_the_cause_too(attempt):
    said = "The rollout failed: all SGLang servers have been down for 9 s (...): http://s1:1; see their log files."
    attempt.rank_ended(0, EndKind.SERVERS_LOST, 1, said)
    ended = attempt.outcome(TRAINER, 1)
    assert ended.code == 11 and f"rank 0 on t1 ended with exit code 1: {said}" in ended.line


@pytest.mark.parametrize("kind", EndKind)
@pytest.mark.parametrize(
    "sentence", ["", "all SGLang servers have been down", "2 mistakes to correct:", "SAVED", "Hang:"]
)
def test_the_words_of_a_record_change_neither_exit_code_nor_restarts(attempt, kind, sentence):
    """A reworded message changes the users' text, and nothing else."""
    attempt.ended(TRAINER, t1=1)
    attempt.rank_ended(0, kind, 1, sentence)
    attempt.log("trainer-rank-0.log", sentence)
    ended = attempt.outcome(TRAINER, 1, asked_by="USR1")
    assert (ended.code, ended.requeue) == (11 if kind is EndKind.SERVERS_LOST else 12, False)


def test_servers_that_are_never_healthy_are_named(attempt):
    attempt.process_ended(WAITING, EndKind.FAILED, 1, "not healthy within 60 s: http://s1:1")
    ended = attempt.outcome(SERVERS, 1)
    assert ended.code == 11 and "not healthy within 60 s: http://s1:1; their logs are" in ended.line


def test_the_preflight_s_verdict_is_the_cause(attempt):
    for node in ("t1", "s1"):
        attempt.process_ended(preflight_name(node), EndKind.FAILED, 1, "s1: has 3 GPUs, 8 are needed; drain it", node)
    ended = attempt.outcome(PREFLIGHT, 1)
    assert ended.code == 10 and ended.line.startswith("FAILED (10): preflight: s1: has 3 GPUs")
    assert "preflight-t1.log" in ended.line


def test_where_no_program_could_tell_slurm_is_quoted(attempt):
    attempt.log("srun-trainer.log", "srun: error: Node failure on t2")
    assert attempt.outcome(TRAINER, 1).line.startswith("FAILED (12): trainer: srun: error: Node failure on t2")


def test_where_nobody_said_anything_the_logs_are_named(attempt):
    assert f"{attempt.logs}/trainer-*.log" in attempt.outcome(TRAINER, 1).line
    attempt.log("trainer-t2.log", "Killed")
    attempt.ended(TRAINER, t2=-9)
    assert "trainer on t2 ended with exit code 137: Killed" in attempt.outcome(TRAINER, 137).line


def test_the_line_is_one_line_of_bounded_length(attempt):
    attempt.rank_ended(0, EndKind.FAILED, 1, f"ValueError: {'x ' * 2000}")
    line = attempt.outcome(TRAINER, 1).line
    assert len(line) <= 600 and "\n" not in line


def test_a_node_that_does_not_see_the_folder_is_blamed_before_those_who_wait_for_it(attempt):
    attempt.log("srun-preflight.log", "srun: error: task 2 launch failed: Slurmd could not connect IO")
    attempt.process_ended(preflight_name("t1"), EndKind.FAILED, 1, "s1: not heard of within 120 s")
    ended = attempt.outcome(PREFLIGHT, 1)
    assert ended.code == 10 and ended.line.startswith("FAILED (10): s1: Slurm could not start the preflight task: ")
    assert ended.line.endswith(f"; is {attempt.logs} the same folder there as on t1?")
