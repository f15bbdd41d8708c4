"""NCCL's and torch's settings in the environment that training on GPUs needs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}
"""Common to trainer and servers, since they share communicators for the weights. SGLang switches
NCCL's cuMem allocations off in its processes; if others on the same machine use them, joining fails
or hangs."""

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def prepare() -> None:
    """Set the environment variables of NCCL and torch. The user's own settings stay.

    Must run before the process's first use of NCCL, which reads its settings once.
    """
    # the last one exists before other threads read the environment, so that `without_watchdog` only
    # changes it
    for name, value in (ENVIRONMENT | {_BLOCKING_WAIT: "0"}).items():
        os.environ.setdefault(name, value)


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Make NCCL process groups without a watchdog thread.

    Errors and timeouts do not end the process; `Work.wait` blocks, and raises them. torch reads
    this setting only from the environment, for each new group.
    """
    before = os.environ.get(_BLOCKING_WAIT, "0")
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        os.environ[_BLOCKING_WAIT] = before
