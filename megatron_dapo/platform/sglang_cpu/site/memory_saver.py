"""SGLang plug-in: a server with --enable-memory-saver really gives its memory back.

On GPUs the package torch_memory_saver does that. Here `pause` takes the memory of all storages
made in the region of its tag, and `resume` makes it again, with NaN in it. The ledger
(megatron_dapo/platform/cpu_ledger.py), if one is kept, shows both.

A storage once read through NumPy cannot be resized. SGLang's checksums do that to weights. Such a
storage is filled with NaN and counted as given back.
"""

import functools
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

TARGET = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create"
HOLDER = "server"
GARBAGE = 0xA5  # byte of integers


class Recording(TorchDispatchMode):
    """Notes the type of every storage that torch's operations make while it is entered."""

    def __init__(self, made):
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {tensor.untyped_storage() for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in inputs:
                self._made[tensor.untyped_storage()] = tensor.dtype
        return result


class TaggedMemory:
    """The storages of one tag that are still in use."""

    def __init__(self, tag):
        self.made = WeakKeyDictionary()  # storage -> dtype
        self._tag = tag
        self._away = {}  # storage -> bytes
        self._booked = 0

    def pause(self):
        """Take the storages' memory."""
        for storage, dtype in list(self.made.items()):
            if not storage.resizable():
                fill(storage, dtype)
            elif storage not in self._away:
                self._away[storage] = storage.nbytes()
                storage.resize_(0)
        self.book(0)

    def resume(self):
        """Make it again, with other contents."""
        self.book(sum(self._away.get(storage, storage.nbytes()) for storage in self.made))
        for storage, size in self._away.items():
            storage.resize_(size)
            fill(storage, self.made[storage])
        self._away.clear()

    def book(self, num_bytes):
        """Have the ledger show these bytes; raises MemoryError if it has less."""
        from megatron_dapo.platform.cpu_ledger import ledger_of

        change = num_bytes - self._booked
        ledger = ledger_of(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        if ledger is not None and change > 0:
            ledger.take(HOLDER, change, self._tag)
        elif ledger is not None and change < 0:
            ledger.give(HOLDER, -change, self._tag)
        self._booked = num_bytes


class CpuMemorySaver:
    """SGLang's adapter of a memory saver; one for the process."""

    enabled = True

    def __init__(self):
        self._regions = {}  # tag -> TaggedMemory

    @contextmanager
    def region(self, tag, enable_cpu_backup=False):
        region = self._regions.setdefault(tag, TaggedMemory(tag))
        with Recording(region.made):
            yield
        region.book(sum(storage.nbytes() for storage in region.made))

    def pause(self, tag):
        if tag in self._regions:  # there are no graphs here
            self._regions[tag].pause()

    def resume(self, tag):
        if tag in self._regions:
            self._regions[tag].resume()

    @contextmanager
    def nothing(self, **kwargs):
        yield

    configure_subprocess = cuda_graph = disable = nothing

    def check_validity(self, caller_name):
        pass


saver = functools.cache(CpuMemorySaver)


def fill(storage, dtype):
    """Fill a storage with NaN, or with garbage if its type has none."""
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)
    if dtype.is_floating_point:
        bytes_.view(dtype).fill_(torch.nan)
    else:
        bytes_.fill_(GARBAGE)


def create(original, enable):
    """Return the adapter here in place of torch_memory_saver's."""
    return saver() if enable else original(enable)


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    run_inside(TARGET, create)
