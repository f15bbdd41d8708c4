"""Handles of memory on shared GPUs, for servers: CUDA IPC, on a CPU shared memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, multiprocessing

from megatron_dapo.weight_sync.buckets import Bucket


@dataclass(frozen=True)
class ServerPlace:
    """The trainer ranks on one server's GPUs, in the order of the server's ranks."""

    url: str
    ranks: tuple[int, ...]

    @property
    def poster(self) -> int:
        """Return the rank that sends the server's requests."""
        return self.ranks[0]


def places(urls: Sequence[str], world_size: int) -> list[ServerPlace]:
    """Return each server's place: they cover the trainer's ranks in their order."""
    size = world_size // len(urls)
    assert size * len(urls) == world_size, f"{len(urls)} servers do not share {world_size} GPUs evenly"
    return [ServerPlace(url, tuple(range(i * size, (i + 1) * size))) for i, url in enumerate(urls)]


def prepare_handles() -> None:
    """Import what `serialized` needs of SGLang: not at the top, since only runs with shared GPUs have
    it in the trainer, and not in a push, since it takes seconds."""
    from sglang.srt.utils import MultiprocessingSerializer  # noqa: F401
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata  # noqa: F401

    if torch.cuda.is_available():  # names devices by UUID: processes number visible devices differently
        monkey_patch_torch_reductions()


def serialized(flat: Tensor, bucket: Bucket) -> str:
    """Return a handle of a flat bucket as SGLang's route `update_weights_from_tensor` takes it.

    One per copy and bucket: torch pairs each export of a tensor with one release.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = []
    start = 0
    for spec, shape in zip(bucket.specs, bucket.shapes, strict=True):
        size = torch.Size(shape).numel() * spec.dtype.itemsize
        metadata.append(FlattenedTensorMetadata(spec.name, torch.Size(shape), spec.dtype, start, start + size, size))
        start += size
    with _shared_by_name():
        return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata}, output_str=True)


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share memory of the CPU by name: file descriptors pass only between relatives."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)


def collect_handles() -> None:
    """Free the memory of handles that the servers have let go."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
