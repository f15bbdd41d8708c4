"""NCCL's and torch's settings in the environment that training on GPUs needs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}
"""What trainer and servers must have alike, since they share communicators for the weights. SGLang switches NCCL's
cuMem allocations off in its processes; where others on the same machine use them, joining fails or hangs."""

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def prepare() -> None:
    """Set the environment variables of NCCL and torch. This must run before the process's first use of NCCL, which
    reads its settings once. What the user has set stays."""
    # the last: so that `without_watchdog` changes a variable that is there, while other threads may read others
    for name, value in (ENVIRONMENT | {_BLOCKING_WAIT: "0"}).items():
        os.environ.setdefault(name, value)


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Give the NCCL process groups that are made inside no watchdog thread: an error, or a time limit that has passed,
    ends no process but is raised by `Work.wait`, which blocks. torch takes this from the environment alone, group by
    group."""
    before = os.environ.get(_BLOCKING_WAIT, "0")
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        os.environ[_BLOCKING_WAIT] = before
