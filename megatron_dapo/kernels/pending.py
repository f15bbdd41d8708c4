"""Waits for our own collectives.

They have a file of their own: by it the watchdog recognizes a rank that waits for others.
"""

import torch.distributed as dist


def wait_for(work: dist.Work) -> None:
    """Return when the collective is done, or, on a GPU, when later kernels of this stream will run
    after it."""
    work.wait()
