"""The stores of a job's ranks. They listen on one address only; torch's own listen on all."""

import hmac
import os
import socket
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from megatron_dapo.common.addresses import LOOPBACK

_DIGEST_LENGTH = 64


def rendezvous(timeout: timedelta) -> dict:
    """Return the arguments of `init_process_group`: the store at MASTER_ADDR and MASTER_PORT, the
    rank and the number of ranks. Without a launcher: a job of one process.

    If torchrun's agent keeps the store, it has opened it before the ranks began, on all addresses.
    """
    if "RANK" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = host_store(address, port, timeout, world) if is_host else join_store(address, port, timeout, world)
    return {"store": dist.PrefixStore("default_pg", store), "rank": rank, "world_size": world}


def meeting_address() -> str:
    """Return rank 0's address for further stores: loopback if all ranks are on its machine,
    otherwise MASTER_ADDR."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return LOOPBACK
    return os.environ.get("MASTER_ADDR", LOOPBACK)


def host_store(address: str, port: int, timeout: timedelta, world_size: int | None = None) -> dist.TCPStore:
    """Return a new store that listens on this address. Port 0 means a free port. With world_size,
    wait until that many processes are connected."""
    listener = _listener(address, port)
    waits = world_size is not None
    if listener is None:
        return dist.TCPStore(address, port, world_size, True, timeout, wait_for_workers=waits)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, world_size, True, timeout, wait_for_workers=waits, master_listen_fd=listener.detach()
    )


def join_store(address: str, port: int, timeout: timedelta, world_size: int | None = None) -> dist.TCPStore:
    """Return a client of the store at this address. The arguments are the same as the host's."""
    return dist.TCPStore(address, port, world_size, False, timeout, wait_for_workers=world_size is not None)


def _listener(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens only on this address, or None if the store must listen on all
    addresses.

    None for a name: on other nodes it may mean another address, since a machine's own name is often
    its loopback. None too for another machine's address, which forwards to this one.
    """
    try:
        bound = ip_address(LOOPBACK if address == "localhost" else address)
        family = socket.AF_INET6 if bound.version == 6 else socket.AF_INET
        return socket.create_server((str(bound), port), family=family)
    except (ValueError, OSError):
        return None


class SignedStore:
    """Texts under keys of a store, with proof that a rank of this job wrote them. Anybody may be
    able to write to the store; unproven texts do not count."""

    def __init__(self, store: dist.Store, token: bytes) -> None:
        """Use this store. token: a secret of the job's ranks."""
        self.store = store
        self._token = token

    def set(self, key: str, text: str) -> None:
        self.store.set(key, self._signed(key, text))

    def set_first(self, key: str, text: str) -> None:
        """Set the text under the key, unless a rank has set it to another text than "" before."""
        present = self.store.compare_set(key, self._signed(key, ""), self._signed(key, text))
        if self._opened(key, present) is None:
            self.set(key, text)

    def get(self, *keys: str) -> list[str | None]:
        """Return the text under each key, in order, or None if no rank of this job wrote it."""
        return [self._opened(key, value) for key, value in zip(keys, self.store.multi_get(list(keys)), strict=True)]

    def _signed(self, key: str, text: str) -> str:
        return hmac.new(self._token, f"{key}\n{text}".encode(), "sha256").hexdigest() + text

    def _opened(self, key: str, value: bytes) -> str | None:
        text = value[_DIGEST_LENGTH:].decode(errors="replace")
        return text if hmac.compare_digest(value, self._signed(key, text).encode()) else None
