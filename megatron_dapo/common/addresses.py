"""The name of this machine, and its address towards another machine."""

import os
import socket

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # no packet goes there


def node_name() -> str:
    """Return this machine's name; in a Slurm job the node name that Slurm assigned."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback by its usual name or address."""
    return host in (LOOPBACK, "localhost", "::1")


def local_address_towards(host: str, port: int = _ANY_PORT) -> str:
    """Return this machine's address on the interface that routes to `host`.

    Raises:
        OSError: if the name does not resolve, or there is no route.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # no packet is sent: a datagram socket
        return probe.getsockname()[0]
