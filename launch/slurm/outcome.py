"""How an attempt ended: exit code of the job, the last line of its log, and whether it is to be
requeued.

All of it is read off the records that the processes wrote (`common.ends`); a log is read for a
process that was ended before it could write one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.process_names import WAITING, preflight_name, supervisor_name
from launch.slurm.node import ends
from launch.slurm.plan import PREFLIGHT, SERVERS, TRAINER, JobPlan
from launch.slurm.progress import Progress, progress
from megatron_dapo.common.ends import PEER_IS_GONE, End, EndKind, rank_name
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE, exit_phrase
from megatron_dapo.common.log_lines import last_error, read_lines
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder

DONE = 0
PREFLIGHT_FAILED = 10
SERVERS_FAILED = 11
TRAINER_FAILED = 12
NOT_REQUEUED = 13
FAILURES = {PREFLIGHT: PREFLIGHT_FAILED, SERVERS: SERVERS_FAILED, TRAINER: TRAINER_FAILED}
MAX_LINE = 600
PREEMPTED = "TERM"
"""Slurm's signal to a preempted job: it may have had no time for progress."""

_NOT_LAUNCHED = re.compile(r"^srun: error: task (\d+) launch failed: (.*)$")


@dataclass(frozen=True)
class Facts:
    """The body's observations."""

    phase: str
    """The role at that time."""
    exit_code: int
    asked_by: str = ""
    """The signal on which it asked the trainer to save."""
    servers_ended: bool = False
    """Whether the servers' step ended by itself."""
    may_requeue: bool = True
    """REQUEUE=auto."""


@dataclass(frozen=True)
class AttemptOutcome:
    """The next action of the job's script: print the line, then requeue the job or end with the
    code."""

    code: int
    line: str
    requeue: bool = False


def outcome(plan: JobPlan, facts: Facts) -> AttemptOutcome:
    """Return how an attempt ended."""
    trainer = {end.kind for end in ends(plan, TRAINER).values()}
    if facts.phase == TRAINER and EndKind.SAVED in trainer and facts.exit_code == 0:
        return _saved(plan, facts)
    if facts.phase == TRAINER and facts.exit_code == 0:
        return AttemptOutcome(DONE, done_line(plan.run, plan.total_steps))
    if facts.phase == TRAINER and EndKind.USER_ERROR in trainer:
        return _failed(USER_ERROR_EXIT_CODE, (_first_mistake(plan) or _first_cause(plan, TRAINER)).text)
    # before the trainer: its failure may follow from theirs
    culprit = SERVERS if facts.servers_ended else facts.phase
    cause = _first_cause(plan, culprit)
    return _failed(SERVERS_FAILED if cause.kind is EndKind.SERVERS_LOST else FAILURES[culprit], cause.text)


def _saved(plan: JobPlan, facts: Facts) -> AttemptOutcome:
    reached = progress(plan.run)
    started = Progress(plan.start_step, plan.start_groups, plan.start_tokens)
    more = f", and {reached.num_groups} groups of the next one," if reached.num_groups else ""
    saved = f"step {reached.step} of {plan.total_steps}{more} is saved in {plan.run}"
    if reached <= started and facts.asked_by != PREEMPTED:
        return _failed(NOT_REQUEUED, f"nothing was gained in this attempt, so that it is not repeated; {saved}")
    if not (facts.asked_by and facts.may_requeue):
        return AttemptOutcome(SAVED_EXIT_CODE, f"SAVED: {saved}; the same command resumes it")
    restart = plan.restart_count + 1
    if restart > plan.max_restarts:
        return _failed(
            NOT_REQUEUED, f"requeued {plan.restart_count} times, and MAX_RESTARTS is {plan.max_restarts}; {saved}"
        )
    words = f"SAVED: {saved}; requeued on {facts.asked_by}, restart {restart} of at most {plan.max_restarts}"
    return AttemptOutcome(SAVED_EXIT_CODE, words, requeue=True)


def _failed(code: int, cause: str) -> AttemptOutcome:
    line = f"FAILED ({code}): {' '.join(cause.split())}"
    return AttemptOutcome(code, line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}...")


def done_line(run: str, total_steps: int) -> str:
    return f"DONE: step {total_steps} of {total_steps} in {run}"


def is_done(config: Config) -> bool:
    """Return whether the run folder holds the result of the whole run: the last act of a training
    is to write the model."""
    run = RunFolder.of(config.trainer)
    total = config.trainer.total_training_steps
    if not (run.model.is_dir() and run.metrics.is_file()):
        return False
    # imports torch: a job's plan does without
    from megatron_dapo.telemetry.metrics_file import records_of

    steps = [record["step"] for _, record in records_of(run.metrics) if record]
    return bool(steps) and steps[-1] >= total


# ---------------------------------------------------------------------------------- the first cause


@dataclass(frozen=True)
class _Cause:
    """The first failure: process, node, error and log file. kind: None if nobody recorded it."""

    text: str
    kind: EndKind | None = None


def _first_cause(plan: JobPlan, role: str) -> _Cause:
    """Return the first failure of a role's processes."""
    failures = {TRAINER: _rank_failures, SERVERS: _server_failures, PREFLIGHT: _preflight_failures}[role]
    for causes in (_not_launched(plan, role), failures(plan), _task_failures(plan, role), _words_of_slurm(plan, role)):
        for cause in causes:
            return cause
    return _Cause(f"{role} ended without a word; its logs are {plan.logs}/{role}-*.log")


def _first_mistake(plan: JobPlan) -> _Cause | None:
    """Return the mistake of the user that a rank reported."""
    for rank, end in _rank_ends(plan):
        if end.kind is EndKind.USER_ERROR and end.sentence:
            return _Cause(f"{end.sentence} ({_rank_log(plan, rank)})", end.kind)
    return None


def _rank_ends(plan: JobPlan) -> Iterator[tuple[int, End]]:
    for rank in range(len(plan.trainer_nodes) * plan.n_procs_per_node):
        end = plan.ends.read(rank_name(rank))
        if end is not None:
            yield rank, end


def _rank_log(plan: JobPlan, rank: int) -> Path:
    return Path(plan.logs) / f"{rank_name(rank)}.log"


def _rank_failures(plan: JobPlan) -> Iterator[_Cause]:
    """Yield how the ranks failed, the likely first one first."""
    failures = []
    for rank, end in _rank_ends(plan):
        if end.kind.is_good:
            continue
        log = _rank_log(plan, rank)
        words = _words_of(end, log)
        is_later = end.kind.is_consequence or bool(not end.sentence and PEER_IS_GONE.search(words))
        failures.append((is_later, end.time, rank, _Cause(f"rank {rank} on {end.host} {words}; see {log}", end.kind)))
    failures.sort(key=lambda failure: failure[:3])
    if failures and failures[0][3].kind is EndKind.HANG:
        # rank 0, which asked the others, knows most, and goes last
        failures.sort(key=lambda failure: (failure[3].kind is not EndKind.HANG, failure[2]))
    return (cause for *_, cause in failures)


def _words_of(end: End, log: Path) -> str:
    """Return how a process ended, from its log if it was killed before it could report."""
    if end.kind in (EndKind.KILLED, EndKind.TERMINATED):
        return end.sentence
    sentence = end.sentence or last_error(read_lines(log))
    phrase = exit_phrase(end.exit_code)
    return f"{phrase}: {sentence}" if sentence else phrase


def _server_failures(plan: JobPlan) -> Iterator[_Cause]:
    for node in plan.server_nodes:
        end = plan.ends.read(supervisor_name(node))
        if end is None or end.kind.is_good or not end.sentence:
            continue
        log = f" ({plan.logs}/{SERVERS}-{node}.log)" if end.kind is EndKind.USER_ERROR else ""
        yield _Cause(f"{node}: {end.sentence}{log}", end.kind)
    waited = plan.ends.read(WAITING)
    if waited is not None and not waited.kind.is_good:
        yield _Cause(f"{waited.sentence}; their logs are {plan.logs}/server-*.log", waited.kind)


def _preflight_failures(plan: JobPlan) -> Iterator[_Cause]:
    """Yield the verdicts; node 0's, for all nodes, comes first."""
    for node in plan.nodes:
        end = plan.ends.read(preflight_name(node))
        if end is not None and not end.kind.is_good:
            yield _Cause(f"preflight: {end.sentence} ({plan.logs}/{PREFLIGHT}-{node}.log)", end.kind)


def _not_launched(plan: JobPlan, role: str) -> Iterator[_Cause]:
    """Yield the tasks that Slurm could not start: it opens a task's log on the task's node."""
    for line in read_lines(Path(plan.logs) / f"srun-{role}.log"):
        if match := _NOT_LAUNCHED.match(line):
            node = plan.of_role(role)[int(match[1])]
            words = match[2]
            shared = f"; is {plan.logs} the same folder there as on {plan.nodes[0]}?" if "connect IO" in words else ""
            yield _Cause(f"{node}: Slurm could not start the {role} task: {words}{shared}")


def _task_failures(plan: JobPlan, role: str) -> Iterator[_Cause]:
    """Yield the ends of programs without a record of their own, with the last lines of their
    logs."""
    for node, end in ends(plan, role).items():
        if end.exit_code:
            log = Path(plan.logs) / f"{role}-{node}.log"
            sentence = end.sentence if end.kind is EndKind.USER_ERROR else ""
            words = sentence or last_error(read_lines(log))
            yield _Cause(f"{role} on {node} ended with exit code {end.exit_code}: {words}; see {log}", end.kind)


def _words_of_slurm(plan: JobPlan, role: str) -> Iterator[_Cause]:
    for line in read_lines(Path(plan.logs) / f"srun-{role}.log"):
        if "error: " in line:
            yield _Cause(f"{role}: {line} ({plan.logs}/{role}-*.log)")
