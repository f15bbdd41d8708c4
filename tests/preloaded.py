"""Imports of the fork server of tests/forked_ranks.py.
No thread may start: forks have one thread only."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

from megatron_dapo.common.large_imports import large_imports  # noqa: E402

with large_imports():
    import torch._dynamo  # noqa: F401  which every optimizer of torch imports

    import megatron_dapo.trainer  # noqa: F401
    import tests.distributed.checkpoint_worker
    import tests.distributed.convert_worker
    import tests.distributed.curve_worker
    import tests.distributed.head_worker
    import tests.distributed.layout_worker
    import tests.distributed.parity_worker
    import tests.distributed.weight_sync_world  # noqa: F401

if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
    raise RuntimeError(f"an import started {num_threads - 1} threads; forks of this process would be without them")
