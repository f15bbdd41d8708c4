"""A demo from the command line: config, run, closing table, exit code."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from examples.cache import ROOT
from launch.command_line import USER_ERROR_EXIT_CODE, checked_config
from launch.local import run_local
from megatron_dapo.config import SAVED_EXIT_CODE, Config, RunFolder, UserError
from megatron_dapo.telemetry import Summary, closing_table, read_metrics


@dataclass(frozen=True)
class Demo:
    """What distinguishes one demo from another.

    next_steps: (what, command) shown at the end; {run} stands for the run folder, {last} for the last step's samples.
    """

    title: str
    config: Path
    next_steps: tuple[tuple[str, str], ...]

    def run(self, prepared: list[str], overrides: list[str]) -> int:
        """Train with the config, `prepared` and then `overrides` (key=value) on top; 0 only if the run ended well."""
        try:
            config = checked_config(str(self.config), [*prepared, *overrides])
            folder = RunFolder.of(config.trainer.run_dir, config.trainer.experiment_name)
            _set_aside(folder.path)
            print(f"{self.title}\nrun folder: {folder.path}\n", flush=True)
            start = time.monotonic()
            exit_code = run_local(config)
        except UserError as error:
            print(error.report(), file=sys.stderr)
            return USER_ERROR_EXIT_CODE
        if exit_code == SAVED_EXIT_CODE:
            print(f"\nStopped and saved; go on with: python -m launch.local --config {folder.logs}/config.yaml")
            return exit_code
        if exit_code:
            print(f"\nThe run ended with exit code {exit_code}; its logs are in {folder.logs}", file=sys.stderr)
            return exit_code
        print(f"\n{self._closing(config, folder, time.monotonic() - start)}")
        return 0

    def _closing(self, config: Config, folder: RunFolder, seconds: float) -> str:
        last = folder.rollout(config.trainer.total_training_steps)
        width = max(len(what) for what, _ in self.next_steps)
        return "\n".join(
            [
                closing_table(Summary.of(read_metrics(folder.metrics))),
                f"{'  with start and end':<28}{seconds:>10.1f}",
                "",
                f"run folder: {folder.path}",
                "what to try next:",
                *(f"  {what:<{width}}  {c.format(run=folder.path, last=last)}" for what, c in self.next_steps),
            ]
        )


def _set_aside(folder: Path) -> None:
    """Rename the folder of an earlier run to NAME-1, -2 ..., so that each run starts with an empty one."""
    if folder.exists():
        number = 1
        while (earlier := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        folder.rename(earlier)
        print(f"The earlier run of this name is now {earlier}")


def config_path(name: str) -> Path:
    return ROOT / "configs" / name


def prompt_files(train: Path, val: Path) -> list[str]:
    """Overrides that name them."""
    return [f"data.{key}={json.dumps([str(path)])}" for key, path in (("train_files", train), ("val_files", val))]
