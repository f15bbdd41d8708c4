"""Moves an earlier run's output out of the way, before this run overwrites it or mixes with it."""

import re
from pathlib import Path

from megatron_dapo.storage.run_folder import RunFolder


def set_aside(run: RunFolder) -> Path | None:
    """Move an earlier run's output to a new folder earlier_N and return that, or None if there is
    none.

    For a run that starts at step 0: the earlier one finished without a checkpoint, or ended before
    its first.
    """
    dumps = [path for folder in _folders(run) for path in _dumps(folder)]
    has_reported = run.metrics.is_file() and run.metrics.stat().st_size
    if not (dumps or has_reported or run.model.exists()):
        return None
    number = 1
    while (earlier := run.path / f"earlier_{number}").exists():
        number += 1
    earlier.mkdir()
    ids = (run.logger_id("wandb"), run.logger_id("mlflow"))
    for path in (run.metrics, run.tensorboard, *ids, *_folders(run), run.model, run.adapter, run.config):
        if path.exists():
            path.rename(earlier / path.name)
    return earlier


def remove_later_dumps(run: RunFolder, step: int) -> list[int]:
    """Remove samples, batches and held-out answers of the steps after `step`; return those steps,
    ascending.

    For a run that resumes after a step: it repeats the later ones, or leaves them out if it is
    shorter now.
    """
    dumps = {path: later for folder in _folders(run) for path, later in _dumps(folder).items()}
    for path, later in dumps.items():
        if later > step:
            path.unlink()
    return sorted({later for later in dumps.values() if later > step})


def _folders(run: RunFolder) -> tuple[Path, ...]:
    return run.rollouts, run.batches, run.validation(0).parent


def _dumps(folder: Path) -> dict[Path, int]:
    """Return the files of one rollout step each, with the step: samples, their tokens, batches."""
    names = {path: re.fullmatch(r"step_(\d{6,})\.(jsonl|npz|json\.gz)", path.name) for path in folder.glob("step_*")}
    return {path: int(name[1]) for path, name in names.items() if name}
