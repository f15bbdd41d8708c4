"""Random number generators of this rank: torch's, Megatron's, Python's and numpy's."""

import random
import zlib
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megatron_dapo.checkpointing.torch_dist.reading import PickledObject
from megatron_dapo.common.seeds import seed_generators
from megatron_dapo.platform.device import is_gpu

# numpy's state holds an array; it is read as a record of its bytes, since numpy's own classes take
# more than numbers
STORED_CLASSES = [
    (PickledObject, name)
    for name in ("numpy.ndarray", "numpy.dtype", "numpy._core.multiarray._reconstruct", "numpy.dtypes.UInt32DType")
]


def generator_states() -> dict[str, Any]:
    """Return the states of all of them, to be pickled."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }
    return {**states, "cuda": torch.cuda.get_rng_state()} if is_gpu() else states


def restore_generators(states: dict[str, Any]) -> None:
    """Set all generators to a result of `generator_states`, read with `STORED_CLASSES`."""
    random.setstate(states["python"])
    name, key, *rest = states["numpy"]
    np.random.set_state((name, np.frombuffer(key.state[-1], "<u4"), *rest))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if is_gpu() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def derived_seed(states: dict[str, Any]) -> int:
    """Return a seed that differs from state to state."""
    seed = zlib.crc32(repr(states["python"]).encode())
    for state in (states["torch"], *states["megatron"].values()):
        seed = zlib.crc32(state.cpu().numpy().tobytes(), seed)
    return seed


def reseed(seed: int, rank: int) -> None:
    """Seed all generators anew, if the ranks of a checkpoint and of this run do not correspond.

    Megatron derives the tensor- and pipeline-parallel ones from the one seed.
    """
    seed_generators(seed + rank)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
