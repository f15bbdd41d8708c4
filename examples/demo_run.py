"""A demo from the command line: config, run, closing table, exit code."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.cache import ROOT, cache_folder
from launch.command_line import checked_config
from launch.local import run_local
from megatron_dapo.commands.report.command import write_report
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import Summary, closing_table, read_metrics


@dataclass(frozen=True)
class Demo:
    """One demo: its title, config, data and model."""

    title: str
    config: str  # a file name in configs/
    files: Callable[[Path], tuple[Path, Path]]
    """Writes the prompt files of training and validation to a folder."""
    model: Callable[[], Path]
    """Makes the model's folder if it is missing, and returns it."""
    next_steps: tuple[tuple[str, str], ...]
    """(purpose, command), shown at the end behind those of all demos."""
    machine: Callable[[], list[str]] = list
    """Returns the config overrides for this machine."""

    def run(self, overrides: list[str]) -> int:
        """Train with the config, files and model, and `overrides` (key=value) on top. Return 0 only
        for a good end."""
        try:
            prepared = [f"actor_rollout_ref.model.path={self.model()}"]
            prepared += prompt_files(*self.files(cache_folder() / Path(self.config).stem))
            config = checked_config(str(config_path(self.config)), [*prepared, *self.machine(), *overrides])
            folder = RunFolder.of(config.trainer)
            set_aside(folder.path)
            print_line(f"{self.title}\nrun folder: {folder.path}\n")
            start = time.monotonic()
            exit_code = run_local(config)
        except UserError as error:
            print(error.report(), file=sys.stderr)
            return USER_ERROR_EXIT_CODE
        if exit_code == SAVED_EXIT_CODE:
            print_line(f"\nStopped and saved; go on with: python -m launch.local --config {folder.logs}/config.yaml")
            return exit_code
        if exit_code:
            print(f"\nThe run ended with exit code {exit_code}; its logs are in {folder.logs}", file=sys.stderr)
            return exit_code
        print_line(f"\n{self._closing(config, folder, time.monotonic() - start)}")
        return 0

    def _closing(self, config: Config, folder: RunFolder, seconds: float) -> str:
        last = folder.rollout(config.trainer.total_training_steps)
        next_steps = (
            ("read what it writes now", f"less {last}"),
            ("evaluate it", f".venv/bin/python -m megatron_dapo eval --model {folder.model}"),
            ("compare two runs", f".venv/bin/python -m megatron_dapo report {folder.path} OTHER_RUN"),
            *self.next_steps,
        )
        width = max(len(what) for what, _ in next_steps)
        return "\n".join(
            [
                closing_table(Summary.of(read_metrics(folder.metrics))),
                f"{'  with start and end':<28}{seconds:>10.1f}",
                "",
                f"run folder: {folder.path}",
                *_report(folder),
                "what to try next:",
                *(f"  {what:<{width}}  {command}" for what, command in next_steps),
            ]
        )


# hints for the demo's page: (section, hint)
_LOOK_AT = (
    (
        "Curves",
        "reward and accuracy rise, entropy falls; 'Server and trainer' stays near 0: both have the same weights",
    ),
    ("Curves", "'Filtered groups': more and more are all right, so dynamic sampling draws more to fill a step"),
    ("Time", "what a step waits for"),
    ("Answers", "step 1 beside the last one: filter 'wrong', then colour tokens by advantage"),
    ("Answers", "held-out prompts: which 'became right', and which 'became wrong'"),
)


def _report(folder: RunFolder) -> list[str]:
    """Write the run's page. Return lines with its path and hints, or with the reason for its
    absence."""
    try:
        write_report([folder.path], folder.report)
    except UserError as error:
        return [f"no report: {error}", ""]
    looks = [f"  {section:<8} {what}" for section, what in _LOOK_AT]
    return [f"report: {folder.report}", "open it in a browser, and look at", *looks, ""]


def set_aside(folder: Path) -> None:
    """Rename the folder of an earlier run to NAME-1, -2 ...: each run starts with an empty one."""
    if folder.exists():
        number = 1
        while (earlier := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        folder.rename(earlier)
        print(f"The earlier run of this name is now {earlier}")


def config_path(name: str) -> Path:
    return ROOT / "configs" / name


def prompt_files(train: Path, val: Path) -> list[str]:
    """Return the overrides naming these prompt files."""
    return [f"data.{key}={json.dumps([str(path)])}" for key, path in (("train_files", train), ("val_files", val))]
