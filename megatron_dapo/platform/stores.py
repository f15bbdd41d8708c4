"""The stores in which ranks meet, on the address that they use and no other: torch's own listen on all of them."""

import hmac
import os
import socket
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from megatron_dapo.common.addresses import LOOPBACK

_DIGEST_LENGTH = 64


def rendezvous(timeout: timedelta) -> dict:
    """Return what `init_process_group` needs: the store at MASTER_ADDR and MASTER_PORT, this rank, and how many ranks
    there are. Without a launcher, this describes a job of one process.

    Where torchrun's agent keeps the store, it has opened it before the ranks began, on all addresses.
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
    """Return the address where rank 0 opens further stores: loopback where all ranks are on its machine, otherwise
    MASTER_ADDR."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return LOOPBACK
    return os.environ.get("MASTER_ADDR", LOOPBACK)


def host_store(address: str, port: int, timeout: timedelta, world_size: int | None = None) -> dist.TCPStore:
    """Open a store that listens on this address, and return it. Port 0 means a free port. Where world_size is given,
    the call waits until that many processes are connected."""
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
    """Return a socket that listens on this address alone, or None where the store has to listen on all addresses. That
    is so for a name, which may mean another address to other nodes (a machine's own name often means a loopback address
    there), and for an address of another machine, which forwards to this one."""
    try:
        bound = ip_address(LOOPBACK if address == "localhost" else address)
        family = socket.AF_INET6 if bound.version == 6 else socket.AF_INET
        return socket.create_server((str(bound), port), family=family)
    except (ValueError, OSError):
        return None


class SignedStore:
    """Texts under keys of a store, each with proof that a rank of this job wrote it there: whoever reaches the store
    may write to it, and what others wrote does not count."""

    def __init__(self, store: dist.Store, token: bytes) -> None:
        """Use this store. `token` belongs to the job and is known to its ranks alone."""
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
        """Return the text under each key, in order, or None where it was not written by a rank of this job."""
        return [self._opened(key, value) for key, value in zip(keys, self.store.multi_get(list(keys)), strict=True)]

    def _signed(self, key: str, text: str) -> str:
        return hmac.new(self._token, f"{key}\n{text}".encode(), "sha256").hexdigest() + text

    def _opened(self, key: str, value: bytes) -> str | None:
        text = value[_DIGEST_LENGTH:].decode(errors="replace")
        return text if hmac.compare_digest(value, self._signed(key, text).encode()) else None
