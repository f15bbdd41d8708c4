"""How an attempt ended: exit code of the job, the last line of its log, and whether it is to be requeued."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.slurm.node import ends
from launch.slurm.plan import PREFLIGHT, SERVERS, TRAINER, Plan
from launch.slurm.progress import Progress, progress
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.config.schema import Config
from megatron_dapo.storage.run_folder import RunFolder

DONE = 0
PREFLIGHT_FAILED = 10
SERVERS_FAILED = 11
TRAINER_FAILED = 12
NOT_REQUEUED = 13
FAILURES = {PREFLIGHT: PREFLIGHT_FAILED, SERVERS: SERVERS_FAILED, TRAINER: TRAINER_FAILED}
MAX_LINE = 600
PREEMPTED = "TERM"
"""What a job that still runs is asked by when others get its nodes: it may not have had the time to gain anything."""

_FAILED_RANK = re.compile(r"^rank (\d+) on (\S+) (.+) at (\S+)$")  # launch.torchrun writes it
_ERROR = re.compile(
    r"^(\[rank\d+\]: )?((\w+\.)*\w*(Error|Exception|Failure|Interrupt|Exit)\b.*|Fatal Python error.*|Hang: .*"
    r"|The rollout failed: .*)$"
)
_SERVERS_LOST = "all SGLang servers have been down"  # the rollout's words
_NOT_LAUNCHED = re.compile(r"^srun: error: task (\d+) launch failed: (.*)$")
# what a rank says whose peer is gone: never the first cause while another rank says something else
_PEER_IS_GONE = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Broken pipe|NCCL|DistBackendError|DistNetworkError|[Tt]imed out"
    r"|killed by SIGTERM|heartbeat"
)


@dataclass(frozen=True)
class Facts:
    """What the body saw. phase: the role it was about. asked_by: the signal on which it asked the trainer to save.
    servers_ended: the step of the servers ended by itself. may_requeue: REQUEUE=auto. max_restarts: MAX_RESTARTS."""

    phase: str
    exit_code: int
    asked_by: str = ""
    servers_ended: bool = False
    may_requeue: bool = True
    max_restarts: int = 20


@dataclass(frozen=True)
class Outcome:
    code: int
    line: str
    requeue: bool = False


def outcome(plan: Plan, facts: Facts) -> Outcome:
    trainer = ends(plan, TRAINER)
    if facts.phase == TRAINER and SAVED_EXIT_CODE in trainer.values() and facts.exit_code == 0:
        return _saved(plan, facts)
    if facts.phase == TRAINER and facts.exit_code == 0:
        return Outcome(DONE, done_line(plan.run, plan.total_steps))
    if facts.phase == TRAINER and USER_ERROR_EXIT_CODE in trainer.values():
        return _failed(USER_ERROR_EXIT_CODE, first_mistake(plan) or first_cause(plan, TRAINER))
    # before the trainer, which may have died of it
    blamed = SERVERS if facts.servers_ended else facts.phase
    cause = first_cause(plan, blamed)
    return _failed(SERVERS_FAILED if _SERVERS_LOST in cause else FAILURES[blamed], cause)


def _saved(plan: Plan, facts: Facts) -> Outcome:
    reached, started = progress(plan.run), Progress(plan.start_step, plan.start_groups)
    more = f", and {reached.num_groups} groups of the next one," if reached.num_groups else ""
    saved = f"step {reached.step} of {plan.total_steps}{more} is saved in {plan.run}"
    if reached <= started and facts.asked_by != PREEMPTED:
        return _failed(NOT_REQUEUED, f"nothing was gained in this attempt, so that it is not repeated; {saved}")
    if not (facts.asked_by and facts.may_requeue):
        return Outcome(SAVED_EXIT_CODE, f"SAVED: {saved}; the same command goes on from there")
    restart = plan.restart_count + 1
    if restart > facts.max_restarts:
        return _failed(
            NOT_REQUEUED, f"requeued {plan.restart_count} times, and MAX_RESTARTS is {facts.max_restarts}; {saved}"
        )
    words = f"SAVED: {saved}; requeued on {facts.asked_by}, restart {restart} of at most {facts.max_restarts}"
    return Outcome(SAVED_EXIT_CODE, words, requeue=True)


def _failed(code: int, cause: str) -> Outcome:
    line = f"FAILED ({code}): {' '.join(cause.split())}"
    return Outcome(code, line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}...")


def done_line(run: str, total_steps: int) -> str:
    return f"DONE: step {total_steps} of {total_steps} in {run}"


def is_done(config: Config) -> bool:
    """Whether the run folder holds the result of the whole run: the last act of a training is to write the model."""
    run, total = RunFolder.of(config.trainer), config.trainer.total_training_steps
    if not (run.model.is_dir() and run.metrics.is_file()):
        return False
    from megatron_dapo.telemetry.metrics_file import records_of  # imports torch: a job's plan does without

    steps = [record["step"] for _, record in records_of(run.metrics) if record]
    return bool(steps) and steps[-1] >= total


# ---------------------------------------------------------------------------------------------- reading the logs


def first_cause(plan: Plan, role: str) -> str:
    """Of the role's logs, what went wrong first: who, on which node, in whose words, and the log file."""
    found = {TRAINER: _rank_failures, SERVERS: _server_failures, PREFLIGHT: _preflight_failures}[role](plan)
    cause = next(_not_launched(plan, role), None) or next(found, None) or next(_last_words(plan, role), None)
    return cause or f"{role} ended without a word; its logs are {plan.logs}/{role}-*.log"


def first_mistake(plan: Plan) -> str | None:
    """The first sentence of a mistake of the user that a rank reported."""
    for log in sorted(Path(plan.logs).glob("trainer-rank-*.log")):
        lines = _lines(log)
        for i, line in enumerate(lines):
            if re.search(r"\d+ mistakes? to correct:$", line) and i + 1 < len(lines):
                return f"{lines[i + 1]} ({log})"
    return None


def _rank_failures(plan: Plan) -> Iterator[str]:
    """Failed ranks as their nodes' launchers told them, the likely first one first."""
    told = [
        (match[4], int(match[1]), match[2], match[3])
        for node in plan.trainer_nodes
        for line in _lines(Path(plan.logs) / f"{TRAINER}-{node}.log")
        if (match := _FAILED_RANK.match(line))
    ]
    failures = []
    for time, rank, node, end in told:
        log = Path(plan.logs) / f"trainer-rank-{rank}.log"
        error = "" if end.startswith("was killed") else last_error(_lines(log))
        is_later = bool(_PEER_IS_GONE.search(error or end))
        words = f"rank {rank} on {node} {end}{f': {error}' if error else ''}; see {log}"
        failures.append((is_later, time, rank, words))
    return (words for *_, words in sorted(failures))


def _server_failures(plan: Plan) -> Iterator[str]:
    for node in plan.server_nodes:
        log = Path(plan.logs) / f"{SERVERS}-{node}.log"
        lines = _lines(log)
        for i, line in enumerate(lines):
            if line.startswith("The servers failed: "):
                tail = [text.removeprefix("  | ") for text in lines[i + 1 :] if text.startswith("  | ")]
                said = last_error(tail)
                yield f"{node}: {line.removeprefix('The servers failed: ')}{f' ({said})' if said else ''}"
            elif re.search(r"\d+ mistakes? to correct:$", line) and i + 1 < len(lines):
                yield f"{node}: {lines[i + 1]} ({log})"
    waited = _lines(Path(plan.logs) / "waiting.log")
    if waited:
        yield f"{waited[-1]}; their logs are {plan.logs}/server-*.log"


def _preflight_failures(plan: Plan) -> Iterator[str]:
    """Node 0's verdict of all comes first."""
    for node in plan.nodes:
        log = Path(plan.logs) / f"{PREFLIGHT}-{node}.log"
        verdicts = [line for line in _lines(log) if line.startswith("preflight: ") and line != "preflight: ok"]
        if verdicts:
            yield f"{verdicts[-1]} ({log})"


def _not_launched(plan: Plan, role: str) -> Iterator[str]:
    """Slurm opens a task's log on the task's node."""
    for line in _lines(Path(plan.logs) / f"srun-{role}.log"):
        if match := _NOT_LAUNCHED.match(line):
            node, words = plan.of_role(role)[int(match[1])], match[2]
            shared = f"; is {plan.logs} the same folder there as on {plan.nodes[0]}?" if "connect IO" in words else ""
            yield f"{node}: Slurm could not start the {role} task: {words}{shared}"


def _last_words(plan: Plan, role: str) -> Iterator[str]:
    """Where no program told more: the end of a node's log, then Slurm's own words."""
    codes = ends(plan, role)
    for node in (node for node, code in codes.items() if code):
        log = Path(plan.logs) / f"{role}-{node}.log"
        yield f"{role} on {node} ended with exit code {codes[node]}: {last_error(_lines(log))}; see {log}"
    for line in _lines(Path(plan.logs) / f"srun-{role}.log"):
        if "error: " in line:
            yield f"{role}: {line} ({plan.logs}/{role}-*.log)"


def last_error(lines: list[str]) -> str:
    """The last line that names an error; else the last line."""
    errors = [line for line in lines if _ERROR.match(line)]
    said = errors or [line for line in lines if line.strip()]
    return re.sub(r"^\[rank\d+\]: ", "", said[-1]).strip() if said else ""


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
