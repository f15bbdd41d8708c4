"""The trainer's end of the process group it shares with the servers."""

import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.common.addresses import LOOPBACK, local_address_towards
from megatron_dapo.platform import nccl

log = logging.getLogger(__name__)


def address_towards(urls: Sequence[str]) -> str:
    """Return this machine's address on the interface towards the first distant server, or loopback
    if there is none."""
    for url in urls:
        parts = urlsplit(url)
        address = local_address_towards(parts.hostname or "", parts.port or 80)
        if not ip_address(address).is_loopback:
            return address
    return LOOPBACK


class _Backend(Protocol):
    """The methods used of torch's backends, missing in their stubs."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class _Task:
    """A task of the backend, with the future of its end."""

    done: Future[None]
    send: Callable[[_Backend], None]

    def run(self, backend: _Backend) -> None:
        try:
            self.send(backend)
        except Exception as error:
            # without the traceback: its frames keep the backend and its connections alive
            self.done.set_exception(error.with_traceback(None))
        else:
            self.done.set_result(None)


class BroadcastGroup:
    """Rank 0 of a group with server processes as its other ranks.

    Opening starts the rendezvous; `ready` tells its end.

    torch has no public call for a group with processes outside the job: `new_group` takes ranks of
    the job, `init_process_group` one job per process. SGLang uses the private helper behind them.
    Here the backend classes are constructed directly, on that helper's store keys. They are public,
    and can be given up one by one. They enter no global table that would outlive a dead server.

    The backend runs in a separate thread: joining, a broadcast over NCCL and a gloo broadcast to a
    frozen peer block in C++ until their time-out. The caller waits on futures and can give up at
    its own deadline.

    torch's watchdog of NCCL groups ends the whole process when an operation fails or times out, for
    example at a server's death. This group has no watchdog; its futures carry the errors.
    """

    def __init__(self, name: str, address: str, world_size: int, device: torch.device, timeout_s: float) -> None:
        self.name = name
        self.address = address
        self.world_size = world_size
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.ready: Future[None] = Future()
        self._device = device
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._nccl: _Backend | None = None  # once joined
        self._stream: torch.cuda.Stream  # NCCL only, once joined
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port = listener.getsockname()[1]
        limit = timedelta(seconds=timeout_s)
        # our own end is a client, as the servers' are: all waits end at once when `close` drops
        # this only reference
        self._rendezvous: dist.TCPStore | None = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listener.detach(),
        )
        threading.Thread(target=self._run, args=(timeout_s,), name=f"weight-sync-{name}", daemon=True).start()

    def broadcast(self, tensors: Sequence[Tensor], timeout_s: float) -> Future[None]:
        """Send the tensors to all ranks, in order. The tensors must stay as they are until the
        future is done."""
        done: Future[None] = Future()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = limit = timedelta(seconds=timeout_s)

        def send(backend: _Backend) -> None:
            for work in [backend.broadcast([tensor], options) for tensor in tensors]:
                work.wait()

        if self.backend == "gloo":
            self._tasks.put(_Task(done, send))
            return done
        produced = torch.cuda.Event()
        produced.record()

        def send_on_own_stream(backend: _Backend) -> None:
            # a separate stream never holds up the caller's, which continues gathering
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(produced)
                for work in [backend.broadcast([tensor], options) for tensor in tensors]:
                    work.wait(limit)  # NCCL ignores the limit in the options

        self._tasks.put(_Task(done, send_on_own_stream))
        return done

    def close(self) -> None:
        """Leave the group; return at once.

        Pending rendezvous end, for servers too. A running broadcast is aborted (NCCL) or ends by
        its time-out (gloo); then the connections close, which frees servers that wait for the rest.
        Queued broadcasts are not begun: their futures are cancelled.
        """
        self._rendezvous = None
        with suppress(queue.Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task.done.cancel()
        if self._nccl is not None:
            # waits for the running broadcast, as long as that may take
            threading.Thread(target=_abort, args=(self._nccl,), name=f"leave-{self.name}", daemon=True).start()
            self._nccl = None
        self._tasks.put(None)

    def _run(self, timeout_s: float) -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            store = dist.TCPStore(self.address, self.port, is_master=False, wait_for_workers=False, timeout=limit)
            backend = self._join(store, timeout_s)
        except Exception as error:
            self.ready.set_exception(error)
            return
        if self.backend == "nccl":
            self._nccl = backend
        self.ready.set_result(None)
        while (task := self._tasks.get()) is not None:
            task.run(backend)

    def _join(self, store: dist.Store, timeout_s: float) -> _Backend:
        # the keys of torch's helper: the caller's prefix (SGLang's is the group's name), the name,
        # the device type
        device_type = {"nccl": "cuda", "gloo": "cpu"}[self.backend]
        for prefix in (self.name, f"{self.name}/", f"{device_type}/"):
            store = dist.PrefixStore(prefix, store)
        limit = timedelta(seconds=timeout_s)
        if self.backend == "gloo":
            return cast(_Backend, dist.ProcessGroupGloo(store, 0, self.world_size, limit))
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with nccl.without_watchdog():
            return cast(_Backend, dist.ProcessGroupNCCL(store, 0, self.world_size, options))


def _abort(backend: _Backend) -> None:
    try:
        backend.abort()
    except Exception as error:  # nobody waits for this thread
        log.info("weight sync: a group of NCCL did not end in order: %s", error)
