"""The planned cost of a run: days, GPU-hours, and jobs of a time limit."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.checks.model_checks import read_model_specs
from megatron_dapo.commands.plan.step_time import Assumptions, RunTime, StepTime, run_time
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import shares_gpus
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.hardware import HARDWARE

HOUR = 3600.0
DAY = 24 * HOUR
MOSTLY = 0.5  # share of the time that one side spends waiting, from which on the plan mentions it
OLDEST = 8  # the largest max_staleness that still shortens a step; simulating more takes minutes
LEAST_RESTARTS = 20  # requeues that a job has anyway, for preemptions and lost nodes
_UNLIMITED = ("UNLIMITED", "INFINITE", "NOT_SET", "Partition_Limit")
_TIME = re.compile(r"(?:(?P<days>\d{1,5})-)?(?P<parts>\d{1,7}(?::\d{1,2}){0,2})", re.ASCII)


@dataclass(frozen=True)
class JobLimit:
    """The time limit of a job. The defaults are those of the scripts in slurm/."""

    limit_s: float = DAY
    """May be infinite."""
    notice_s: float = 2 * HOUR
    """Seconds from the request to save to the end."""

    def jobs(self, seconds: float) -> int | None:
        """Return the number of jobs for a run of so many seconds; None if the notice uses up a
        job's time."""
        useful = self.limit_s - self.notice_s
        if useful <= 0:
            return None
        return 1 if math.isinf(useful) else max(1, math.ceil(seconds / useful))

    def planned_restarts(self, seconds: float) -> int | None:
        """Return the requeues that such a run should be allowed: a quarter more than the plan has,
        and two."""
        jobs = self.jobs(seconds)
        return None if jobs is None else math.ceil(1.25 * jobs) + 2


def limit_seconds(text: str, name: str = "--time-limit") -> float:
    """Return the seconds of a time limit in Slurm's form: 90 (minutes), 24:00:00, 1-12 (days and
    hours), UNLIMITED. Raises UserError, which calls it `name`."""
    if text in _UNLIMITED:
        return math.inf
    if not (match := _TIME.fullmatch(text)):
        raise UserError(
            f"{name} is {text[:40]}, but must be minutes, hours:minutes:seconds or days-hours, as for sbatch."
        )
    parts = [int(part) for part in match["parts"].split(":")]
    units: tuple[float, ...] = (HOUR, 60.0, 1.0)
    if match["days"] is None:
        units = units[3 - len(parts) :] if len(parts) > 1 else (60.0,)
    seconds = int(match["days"] or 0) * DAY + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if not seconds:
        raise UserError(f"{name} is {text}, but must be above 0.")
    return seconds


def usual_run(config: Config) -> RunTime | None:
    """Return the time of a config's run at its own max_staleness, by the plan's default
    assumptions, on H100.

    None if the plan does not cover it: fine-tuning, dumped batches, an unknown model.
    """
    specs = read_model_specs(config)
    assumed = Assumptions.usual(config, HARDWARE["h100"])
    if config.sft.enable or config.trainer.replay or specs is None:
        return None
    if assumed.acceptance < 1 and config.actor_rollout_ref.rollout.n < 2:
        # no group ever carries signal
        return None
    age = min(config.actor_rollout_ref.rollout.max_staleness, OLDEST)
    return run_time(config, specs[0], assumed, [age], specs[1])


def restarts_line(max_restarts: int, planned: int | None) -> str | None:
    """Return a warning if a job may be requeued less often than planned, else None."""
    if planned is None or max_restarts >= planned:
        return None
    return (
        f"MAX_RESTARTS {max_restarts} is below the {planned} that the planned jobs ask for (1.25 x jobs + 2): the run "
        f"may end with FAILED (13) before its last step; raise it, or leave it out"
    )


def run_seconds(config: Config, step: StepTime) -> float:
    """Return the seconds of the whole run, without validation and saves."""
    return config.trainer.total_training_steps * step.step


def cost_lines(config: Config, step: StepTime, num_gpus: int, limit: JobLimit, hardware: str = "h100") -> Iterator[str]:
    """Yield the cost of a run of such steps, and the side that mostly waits."""
    seconds = run_seconds(config, step)
    hours = seconds * num_gpus / HOUR
    yield (
        f"{_in_days(seconds)} on {num_gpus} GPUs like {hardware.upper()}, {hours:.{0 if hours >= 10 else 2}f} "
        f"GPU-hours: {config.trainer.total_training_steps} steps of {step.step:.{0 if step.step >= 10 else 2}f} s"
    )
    yield _jobs_line(seconds, limit)
    trainer, servers = step.trainer_idle, step.servers_idle
    if max(trainer, servers) < MOSTLY or seconds < HOUR or shares_gpus(config):
        return
    if trainer >= servers:
        yield f"THE TRAINER WAITS {trainer:.0%} of the time for samples: move nodes to servers, or raise max_staleness;"
    else:
        yield f"THE SERVERS' SLOTS ARE FREE {servers:.0%} of the time: move nodes to the trainer;"
    yield "`plan --search` compares layouts and splits of the same nodes"


def _jobs_line(seconds: float, limit: JobLimit) -> str:
    """Return the number of jobs of a time limit for a run, in words."""
    if math.isinf(limit.limit_s):
        return "1 job without a time limit"
    jobs = limit.jobs(seconds)
    sizes = f"of {in_hours(limit.limit_s)}"
    sizes += f", each asked to save {in_hours(limit.notice_s)} before its end" if limit.notice_s else ""
    if jobs is None:
        return f"jobs {sizes}: NONE DOES ANYTHING; give a longer time limit, or a shorter notice"
    return f"{jobs} {'job' if jobs == 1 else 'jobs'} {sizes}"


def _in_days(seconds: float) -> str:
    """Return a duration in its largest unit: 17.2 days, 3.1 hours, 12.0 minutes."""
    for unit, name in ((DAY, "days"), (HOUR, "hours"), (60.0, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} seconds"


def in_hours(seconds: float) -> str:
    """Return a time limit: 24 h, 1.5 h, 2 min."""
    if math.isinf(seconds):
        return "any time"
    return f"{seconds / HOUR:g} h" if seconds >= HOUR else f"{seconds / 60:g} min"
