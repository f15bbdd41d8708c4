"""What the plan says of a Slurm job's time: how many jobs the run takes, and how often one may be requeued."""

import argparse
from dataclasses import dataclass

from megatron_dapo.commands.plan.cost import (
    LEAST_RESTARTS,
    JobLimit,
    limit_seconds,
    restarts_line,
    run_seconds,
    usual_run,
)
from megatron_dapo.commands.plan.dry_run import whole_plan
from megatron_dapo.commands.plan.plan_text import labelled
from megatron_dapo.commands.plan.step_time import RunTime
from megatron_dapo.config.schema.config import Config


@dataclass(frozen=True)
class JobCost:
    """run: the planned time; none where the plan knows nothing of it. max_restarts: MAX_RESTARTS, or what the plan asks
    for and LEAST_RESTARTS at least. planned: what it asks for."""

    limit: JobLimit
    run: RunTime | None
    max_restarts: int
    planned: int | None

    @classmethod
    def of(cls, config: Config, arguments: argparse.Namespace, time_limit_s: float | None) -> "JobCost":
        """Raise UserError where --time-limit is none. time_limit_s: Slurm's own; none = not known."""
        usual = JobLimit()
        if time_limit_s is None:
            time_limit_s = limit_seconds(arguments.time_limit, "TIME_LIMIT") if arguments.time_limit else usual.limit_s
        limit = JobLimit(time_limit_s, arguments.notice if arguments.notice is not None else 0.0)
        run = usual_run(config)
        planned = limit.planned_restarts(run_seconds(config, run.steps[0])) if run else None
        allowed = arguments.max_restarts
        if allowed is None:
            allowed = max(LEAST_RESTARTS, planned or 0)
        return cls(limit, run, allowed, planned)

    def whole_plan(self, config: Config) -> str:
        """Return the process plan, the run's time, and a sentence where too few restarts are allowed."""
        line = restarts_line(self.max_restarts, self.planned)
        return "\n".join([whole_plan(config, self.run, self.limit), *(labelled("", [line]) if line else [])])
