"""The work of `--dry-run`, for every command that trains."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dapo.checks.model_checks import read_model_specs
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.commands.plan.cost import JobLimit, cost_lines, usual_run
from megatron_dapo.commands.plan.plan_text import labelled
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.step_time import RunTime
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config


def whole_plan(config: Config, run: RunTime | None, limit: JobLimit) -> str:
    """Return the process plan with the cost of the run. run: its `usual_run`."""
    cost = [] if run is None else labelled("time", list(cost_lines(config, run.steps[0], run.num_gpus, limit)))
    return "\n".join([process_plan(config), *cost])


def dry_run(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    num_processes: int | None = None,
    show: bool = True,
    check: Callable[[Config], None] = lambda config: None,
    look: Callable[[Config], None] = lambda config: None,
) -> None:
    """Check a config, print it and its process plan, and only then check the run's files and GPU
    memory.

    So a cluster's recipe can be read on a laptop, and anything missing is still reported as a
    mistake.

    Args:
        num_processes: as in `load_and_validate`.
        show: whether to print.
        check: the command's own demands.
        look: looks into the files, once all exist.

    Raises:
        UserError: for any mistake.
    """
    try:
        config = load_and_validate(path, overrides, check_files=False, num_processes=num_processes)
    except UserError:
        # raises, with the missing files as well
        load_and_validate(path, overrides, num_processes=num_processes)
        raise
    mistakes: list[str] = []
    try:
        check(config)
    except UserError as error:
        mistakes += error.sentences
    if show:
        print_line(f"{to_yaml(config)}\n{whole_plan(config, usual_run(config), JobLimit())}")
    try:
        look(load_and_validate(path, overrides))
    except UserError as error:
        mistakes += error.sentences
    if models := read_model_specs(config):
        mistakes += shortage(config, *models)
    if mistakes:
        raise UserError(mistakes)
