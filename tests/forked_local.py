"""`python -m tests.forked_local ARGUMENTS` is launch.local with forks as trainer ranks and servers.

See forked_commands and forked_servers. All its other children are processes as ever.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from launch.local import main
from megatron_dapo.servers import child_process
from tests import forked_servers
from tests.forked_commands import ForkedPopen


def popen(command: list[str], **options: Any) -> Any:
    """A fork of the trainer or of a server, or a process."""
    start = ForkedPopen if command[1:3] == ["-m", "megatron_dapo"] else forked_servers.popen
    return start(command, **options)


@contextmanager
def forks() -> Iterator[None]:
    """Have the trainer ranks and the servers of this process be forks."""
    with mock.patch.object(child_process.subprocess, "Popen", popen):
        yield


def run_here(command: Callable[[list[str]], int], *arguments: str) -> None:
    """Run launch.local's `main`, or its like, in this process, with forks as trainer ranks and
    servers. Raises AssertionError if it fails; its output is pytest's to show."""
    with forks(), mock.patch.dict(os.environ):
        assert command([*arguments]) == 0


if __name__ == "__main__":
    child_process.subprocess.Popen = popen
    sys.exit(main())
