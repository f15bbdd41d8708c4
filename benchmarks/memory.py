"""The most memory held at once by a piece of work, counted allocation by allocation."""

import os
from collections.abc import Callable

import torch

# torch's profiler tells standard error when it starts and stops
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the largest sum of bytes held at once by `work`, of its own allocations.

    On a CPU every request to torch's allocator is counted, inside operators and compiled code too,
    with its number of bytes: the same work gives the same number each time. Other memory is not
    counted: the scratch memory of the matrix library.

    On a GPU it is the excess of torch.cuda.max_memory_allocated over the bytes allocated before;
    each request is rounded up to 512 bytes.
    """
    if torch.device(device).type == "cuda":
        return _cuda_peak(work)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()  # kept alive: the work's result counts as held
    del result
    # address -> bytes; memory freed without an entry was allocated before
    held: dict[int, int] = {}
    now = peak = 0
    for address, num_bytes in _requests(profile):
        if num_bytes > 0:
            held[address] = num_bytes
            now += num_bytes
            peak = max(peak, now)
        else:
            now -= held.pop(address, 0)
    return peak


def _requests(profile: torch.profiler.profile) -> list[tuple[int, int]]:
    """Return (address, bytes; negative for a release) in the order of time."""
    waiting, events = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, num_bytes) for _, address, num_bytes in sorted(events)]


def _cuda_peak(work: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak
