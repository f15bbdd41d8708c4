"""The trainer's end of the process group it shares with the servers."""

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor


def address_towards(urls: Sequence[str]) -> str:
    """This machine's address as the servers see it: that of the interface which routes to the first distant one."""
    for url in urls:
        parts = urlsplit(url)
        family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: nothing is sent
            address = probe.getsockname()[0]
        if not ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


NCCL_MARGIN_S = 60.0


class BroadcastGroup:
    """Rank 0 of a group whose other ranks are server processes. Opening starts the rendezvous; `ready` tells its end.

    torch offers no public call that makes a group with processes outside the job: `new_group` takes ranks of the job,
    `init_process_group` one job per process. SGLang uses the private helper behind them. Here the backend classes are
    constructed instead, on the store keys which that helper uses: they are public, enter no global table that would
    outlive a dead server, and can be given up one by one.

    The backend lives in a thread of its own, since joining, NCCL's first broadcast and a gloo broadcast to a frozen
    peer all block in C++ until their time-out. The caller waits on futures and can give up at its own deadline.
    """

    def __init__(self, name: str, address: str, world_size: int, device: torch.device, timeout_s: float) -> None:
        self.name, self.address, self.world_size = name, address, world_size
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.ready: Future[None] = Future()
        self._device = device
        self._tasks: queue.SimpleQueue[Callable[[object], None] | None] = queue.SimpleQueue()
        self._abort: Callable[[], None] | None = None
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port = listener.getsockname()[1]
        limit = timedelta(seconds=timeout_s)
        # our own end is a client, as the servers' are: all waits end at once when `close` drops this only reference
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
        """Send the tensors to all ranks, in order. The tensors must stay as they are until the future is done."""
        done: Future[None] = Future()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._limit(timeout_s)
        produced = torch.cuda.Event() if self._device.type == "cuda" else None
        if produced is not None:
            produced.record()

        def send(backend: dist.ProcessGroup) -> None:
            for work in [backend.broadcast([tensor], options) for tensor in tensors]:
                work.wait()

        def send_on_own_stream(backend: dist.ProcessGroup) -> None:
            # waiting on a stream of its own never holds up the caller's, which goes on gathering
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                stream.wait_event(produced)
                send(backend)
            stream.synchronize()

        self._tasks.put(partial(_fulfil, done, send_on_own_stream if produced is not None else send))
        return done

    def close(self) -> None:
        """Leave the group; returns at once. Who still waits for others to join, servers too, waits no more. A broadcast
        under way is aborted (NCCL) or ends by its time-out (gloo); then the connections close, which frees servers
        that wait for the rest."""
        self._rendezvous = None
        if self._abort is not None:
            self._abort()
        self._tasks.put(None)

    def _limit(self, timeout_s: float) -> timedelta:
        # NCCL's watchdog ends the whole process when an operation times out; the caller's abort must come before it
        return timedelta(seconds=timeout_s + (NCCL_MARGIN_S if self.backend == "nccl" else 0.0))

    def _run(self, timeout_s: float) -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            store = dist.TCPStore(self.address, self.port, is_master=False, wait_for_workers=False, timeout=limit)
            backend = self._join(store, timeout_s)
        except Exception as error:
            self.ready.set_exception(error)
            return
        if self.backend == "nccl":
            self._abort = backend.abort
        self.ready.set_result(None)
        while (task := self._tasks.get()) is not None:
            task(backend)

    def _join(self, store: dist.Store, timeout_s: float) -> dist.ProcessGroup:
        # the keys of torch's helper: the caller's prefix (SGLang's is the group's name), the name, the device type
        device_type = {"nccl": "cuda", "gloo": "cpu"}[self.backend]
        for prefix in (self.name, f"{self.name}/", f"{device_type}/"):
            store = dist.PrefixStore(prefix, store)
        timeout = self._limit(timeout_s)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, self.world_size, timeout)
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, 0, self.world_size, options)


def _fulfil(future: Future[None], send: Callable[[dist.ProcessGroup], None], backend: dist.ProcessGroup) -> None:
    try:
        send(backend)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
