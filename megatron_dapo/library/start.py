"""Starts a run on this machine from settings in Python."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.command_line import checked_config, require_local
from launch.local import run_local
from megatron_dapo.common.child_environment import COMMON
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, signal_exit_code
from megatron_dapo.first_look import first_look
from megatron_dapo.library.run import Run
from megatron_dapo.storage.run_folder import RunFolder


def train(settings: Mapping[str, Any], recipe: str | Path | None = None) -> Run:
    """Train on this machine as `python -m launch.local` does, and return the run after its end.

    Servers and trainer are processes of their own. Ctrl-C has the run saved and stopped; the same
    call goes on with it.

    Args:
        settings: values of config keys: {"trainer": {"seed": 2}} or {"trainer.seed": 2}.
        recipe: a YAML file on which they are set; None: the defaults.

    Raises:
        UserError: with every mistake of the settings, before anything starts.
        RuntimeError: if the run fails.
        KeyboardInterrupt: after Ctrl-C with nothing to save.
    """
    os.environ.update(COMMON)  # before torch is imported here: its threads would be bound
    config = checked_config(None if recipe is None else str(recipe), overrides_of(settings))
    require_local(config)
    first_look(config)
    code = run_local(config)
    run = RunFolder.of(config.trainer)
    if code == signal_exit_code(signal.SIGINT):
        raise KeyboardInterrupt
    if code not in (0, SAVED_EXIT_CODE):
        raise RuntimeError(f"The run in {run.path} failed with exit code {code}; its output is in {run.logs}.")
    return Run(run.path)


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as `key=value` texts. Raises TypeError for a value that no YAML file can
    have."""
    return [f"{key}={json.dumps(value, default=os.fspath, ensure_ascii=False)}" for key, value in settings.items()]
