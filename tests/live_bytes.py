"""How many bytes of tensors are alive at once."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages made by torch's operations while it is entered, until they are freed.

    peak: the most bytes of them alive together. Earlier storages do not count,
    nor a collective backend's own.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tree_iter((args, kwargs)):  # from outside
            if isinstance(tensor, torch.Tensor):
                self._seen.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._seen.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.alive -= size


def resident_storages() -> list[torch.UntypedStorage]:
    """The storages with memory of all tensors that Python knows of, without those of bytes: host
    memory for others."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor))
    storages = {t.untyped_storage() for t in tensors if t.device.type != "meta" and t.dtype != torch.uint8}
    return [storage for storage in storages if storage.nbytes()]
