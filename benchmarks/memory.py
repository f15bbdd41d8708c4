"""The most memory that a piece of work holds at once, counted allocation by allocation."""

import os
from collections.abc import Callable

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells standard error when it starts and stops


def peak_bytes(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The largest sum of bytes that `work` holds at once, of what was allocated while it ran.

    On a CPU every request to torch's allocator is counted, inside operators and compiled code too, with the number of
    bytes that was asked for: the same work gives the same number each time. Not counted is what does not come from that
    allocator: scratch memory of the matrix library. On a GPU: by how much torch.cuda.max_memory_allocated exceeds what
    was allocated before; it rounds each request up to 512 bytes.
    """
    if torch.device(device).type == "cuda":
        return _cuda_peak(work)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()  # kept alive: what the work leaves behind counts as held
    del result
    held: dict[int, int] = {}  # address -> bytes; what is freed without being in here was allocated before
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
    """(address, bytes; negative where freed) in the order of time."""
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
