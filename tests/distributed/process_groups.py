"""The end of a layout in ranks that go through several."""

import gc

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_dapo.platform.parallel import ParallelLayout


def leave(layout: ParallelLayout) -> None:
    """Release a layout and end its groups, those of Megatron among them.
    Collective over all ranks."""
    dist.barrier()
    layout.release()
    end_groups()


def end_groups() -> None:
    """End all unused groups but that of all ranks.

    Each group of a layout has three gloo threads, awake a hundred times a second. Ranks with the
    groups of several layouts would spend most of their time on that.
    """
    # importable once a layout was initialized
    from megatron.core.distributed import DistributedDataParallel

    for group in list(distributed_c10d._world.pg_map):  # torch has no public list of its groups
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
        del group
    # any reference to a group keeps its threads, and a gradient's hook, which Python cannot follow,
    # keeps a whole model
    for model in [each for each in gc.get_objects() if type(each) is DistributedDataParallel]:
        vars(model).clear()
    gc.collect()
