"""What the fork server of tests/forked_ranks.py imports. It may start no thread: a fork has only the one that forks."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch._dynamo  # noqa: E402, F401  which every optimizer of torch imports

import megatron_dapo.trainer  # noqa: E402, F401
import tests.distributed.checkpoint_worker  # noqa: E402
import tests.distributed.convert_worker  # noqa: E402
import tests.distributed.curve_worker  # noqa: E402
import tests.distributed.head_worker  # noqa: E402
import tests.distributed.layout_worker  # noqa: E402
import tests.distributed.parity_worker  # noqa: E402
import tests.distributed.weight_sync_world  # noqa: E402, F401

if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
    raise RuntimeError(f"an import started {num_threads - 1} threads; forks of this process would be without them")
