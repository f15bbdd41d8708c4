"""The planned time of a Slurm job: the number of jobs for the run, and the allowed requeues."""

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
    """The planned time of a job."""

    limit: JobLimit
    run: RunTime | None
    """None if the plan does not cover the run."""
    max_restarts: int
    """MAX_RESTARTS, or the planned number, at least LEAST_RESTARTS."""
    planned: int | None
    """Requeues that the plan calls for."""

    @classmethod
    def of(cls, config: Config, arguments: argparse.Namespace, time_limit_s: float | None) -> "JobCost":
        """Raise UserError for an invalid --time-limit. time_limit_s: Slurm's own; None: unknown."""
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
        """Return the process plan, the run's time, and a warning if too few restarts are
        allowed."""
        line = restarts_line(self.max_restarts, self.planned)
        return "\n".join([whole_plan(config, self.run, self.limit), *(labelled("", [line]) if line else [])])
