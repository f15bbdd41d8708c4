"""`python -m tests.forked_local ARGUMENTS` is launch.local, but its trainer ranks are forks: see forked_commands.

Servers, and whatever else it starts, are processes of their own as ever.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from launch.local import main
from megatron_dapo.rollout import child_process
from tests.forked_commands import ForkedPopen

START = subprocess.Popen


def popen(command: list[str], **options: Any) -> Any:
    """A fork of the trainer, or a process."""
    return (ForkedPopen if command[1:3] == ["-m", "megatron_dapo"] else START)(command, **options)


def run_here(command: Callable[[list[str]], int], *arguments: str) -> None:
    """Run launch.local's `main`, or what starts the same, in this process, with forks as trainer ranks. Raises
    AssertionError where it fails; what it printed is pytest's to show."""
    with mock.patch.object(child_process.subprocess, "Popen", popen), mock.patch.dict(os.environ):
        assert command([*arguments]) == 0


if __name__ == "__main__":
    child_process.subprocess.Popen = popen
    sys.exit(main())
