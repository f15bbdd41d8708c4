"""`python -m tests.forked_local ARGUMENTS` is launch.local, but its trainer ranks are forks: see forked_commands.

Servers, and whatever else it starts, are processes of their own as ever.
"""

import subprocess
import sys
from typing import Any

from launch.local import main
from megatron_dapo.rollout import child_process
from tests.forked_commands import ForkedPopen

START = subprocess.Popen


def popen(command: list[str], **options: Any) -> Any:
    """A fork of the trainer, or a process."""
    return (ForkedPopen if command[1:3] == ["-m", "megatron_dapo"] else START)(command, **options)


if __name__ == "__main__":
    child_process.subprocess.Popen = popen
    sys.exit(main())
