"""The guard of one command: `python -m megatron_dapo.agents.command_guard`.

Its order is the first line of standard input, so that no secret is an argument. Its output is the
command's. When the command has ended, SIGTERM came or standard input is closed, all descendants of
the command end.
"""

import inspect
import json
import os
import resource
import sys
from functools import partial
from typing import Any, NoReturn

from megatron_dapo.agents import in_sandbox
from megatron_dapo.rewards.code.bubblewrap import WAYS, enclose
from megatron_dapo.rewards.guarded import run_guarded


def _become(order: dict[str, Any]) -> NoReturn:
    """Replace this process by the command, in its sandbox if it has one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order["sandbox"] is None:
        in_sandbox.become(order["argv"], order["environment"])
    sandbox = order.pop("sandbox")
    python = [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-X", "utf8"]
    program = [*python, "-c", inspect.getsource(in_sandbox)]
    command, filter_file, user = enclose(WAYS[sandbox.pop("way")], program, **sandbox, is_for_commands=True)
    os.set_inheritable(filter_file, True)
    order_file = os.memfd_create("order")
    with open(order_file, "w", closefd=False) as file:
        json.dump(order, file)
    os.lseek(order_file, 0, os.SEEK_SET)
    os.dup2(order_file, 0)
    os.chdir("/")
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    os.execvpe(command[0], command, {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})


if __name__ == "__main__":
    _order = json.loads(sys.stdin.readline())
    run_guarded(partial(_become, _order), sys.stdin.fileno(), _order["grace_s"])
