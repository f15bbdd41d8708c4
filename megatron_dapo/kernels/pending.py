"""Waits for collectives of our own, in a file of its own: the watchdog knows by it that a rank waits for others."""

import torch.distributed as dist


def wait_for(work: dist.Work) -> None:
    """Return when the collective is done, or, on a GPU, when later kernels of this stream will run after it."""
    work.wait()
