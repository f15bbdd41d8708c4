"""What this machine is called, and which of its addresses others reach."""

import os
import socket

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent to it


def node_name() -> str:
    """Return the name of this machine; in a Slurm job that which Slurm gives it, as the job's plan has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def local_address_towards(host: str, port: int = _ANY_PORT) -> str:
    """Return the address of this machine from which `host` is reached: that of the interface which routes to it.

    Raises:
        OSError: where the name does not resolve, or nothing routes to it.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]
