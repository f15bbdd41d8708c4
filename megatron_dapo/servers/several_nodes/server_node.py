"""A node of servers over several nodes: its place among them, and what that adds to commands."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dapo.common.addresses import local_address_towards
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.server_command import ServerCommand

_KEY = "actor_rollout_ref.rollout.server.nodes_per_server"


@dataclass(frozen=True)
class ServerNode:
    """A node of servers, as the commands of its processes name it. By default the only one."""

    rank: int = 0
    """0: it leads the servers."""
    num_nodes: int = 1
    addresses: tuple[str, ...] = ()
    """HOST:PORT of each server's leader, at which its processes meet."""
    own_address: str | None = None
    """Of this node for the others."""

    def command(self, number: int, of_one_node: ServerCommand) -> ServerCommand:
        """Return the command of this node's process of a server."""
        if self.num_nodes == 1:
            return of_one_node
        words = ["--nnodes", str(self.num_nodes), "--node-rank", str(self.rank)]
        words += ["--dist-init-addr", self.addresses[number]]
        # else SGLang publishes messages for the other nodes on the address of the default route
        host = {"SGLANG_HOST_IP": self.own_address} if self.own_address and "HOST_IP" not in os.environ else {}
        return replace(of_one_node, command=(*of_one_node.command, *words), environment=host | of_one_node.environment)


ONE_NODE = ServerNode()


@dataclass(frozen=True)
class NodeGroup:
    """Neighbouring nodes that make servers together; the first one leads them."""

    names: tuple[str, ...]
    rank: int
    """Of this node."""
    first_port: int
    """Server i's processes meet on port first_port + i of the leader."""

    @classmethod
    def of(cls, config: Config, names: Sequence[str], here: str | None, first_port: int | None) -> "NodeGroup":
        """Return the group of these nodes, seen from node `here`. Raises UserError."""
        num_nodes = config.actor_rollout_ref.rollout.server.nodes_per_server
        if len(names) != num_nodes or len(set(names)) != num_nodes:
            raise UserError(f"--server-nodes {','.join(names)} must be {num_nodes} different nodes ({_KEY}).")
        if here not in names:
            raise UserError(f"--node {here} is none of --server-nodes {','.join(names)}; give this node's name there.")
        if first_port is None:
            raise UserError("--server-nodes needs --meeting-port, the same number on each of the nodes.")
        return cls(tuple(names), names.index(here), first_port)

    def node(self, num_servers: int) -> ServerNode:
        """Return this node of so many servers."""
        addresses = tuple(f"{self.names[0]}:{self.first_port + i}" for i in range(num_servers))
        return ServerNode(self.rank, len(self.names), addresses, _towards(self.names[1 if self.rank == 0 else 0]))


def _towards(host: str) -> str | None:
    try:
        return local_address_towards(host)
    except OSError:  # the preflight reports the wrong name
        return None
