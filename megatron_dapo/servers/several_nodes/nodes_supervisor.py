"""The supervisor of servers over several nodes: of their leaders, their followers, or both."""

import time
from pathlib import Path

from megatron_dapo.common.addresses import LOOPBACK
from megatron_dapo.config.derived import servers_per_node
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.server_command import ServerCommandMaker, assign_gpus, sglang_command
from megatron_dapo.servers.several_nodes.follower import Follower
from megatron_dapo.servers.several_nodes.server_node import NodeGroup, ServerNode
from megatron_dapo.servers.several_nodes.start_orders import FollowedOrders
from megatron_dapo.servers.supervisor import STOP_GRACE_S, ReservedPort, ServerSupervisor
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import make_server_key


class NodesSupervisor:
    """The processes of such servers on this machine, used as a `ServerSupervisor`.

    In a group of nodes these are one node's: leaders, or followers, which have no URL. Without a
    group all of a server's processes are here and meet on loopback.
    """

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        *,
        first_gpu: int = 0,
        first_port: int | None = None,
        name: str = "server",
        group: NodeGroup | None = None,
        command_of: ServerCommandMaker | None = None,
    ) -> None:
        """Prepare the processes; as `ServerSupervisor`. group: of this node."""
        settings, num_servers = config.actor_rollout_ref.rollout.server, servers_per_node(config)
        self._ports = [] if group else [ReservedPort(LOOPBACK) for _ in range(num_servers)]
        on_loopback = tuple(f"{LOOPBACK}:{port.number}" for port in self._ports)
        num_nodes = settings.nodes_per_server
        all_here = [ServerNode(rank, num_nodes, on_loopback) for rank in range(num_nodes)]
        nodes = [group.node(num_servers)] if group else all_here
        self.key_file = make_server_key(config)
        self._leader: ServerSupervisor | None = None
        self._followers: list[Follower] = []
        make = command_of or sglang_command
        for node in nodes:
            if node.rank == 0:
                self._leader = ServerSupervisor(
                    config, log_dir, first_gpu=first_gpu, first_port=first_port, name=name, node=node, command_of=make
                )
            else:
                self._followers += _followers(config, log_dir, first_gpu, name, node, make)
            first_gpu += num_servers * settings.tensor_model_parallel_size // num_nodes

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the leaders."""
        return self._leader.urls if self._leader is not None else []

    @property
    def were_healthy(self) -> bool:
        """Return whether all servers led here were healthy at some time."""
        return self._leader is None or self._leader.were_healthy

    @property
    def are_over(self) -> bool:
        """Return whether only followers are here, and their servers were stopped for good."""
        return self._leader is None and all(follower.is_over for follower in self._followers)

    def overrides(self) -> list[str]:
        """Return overrides for a trainer's config with the leaders' URLs and key file."""
        return self._leader.overrides() if self._leader is not None else []

    def start(self) -> None:
        """Start the servers led here; followers as they are ordered."""
        if self._leader is not None:
            self._leader.start()
        self._look_at_followers()

    def check(self) -> bool:
        """Look at every process once; see `ServerSupervisor.check`. A follower is healthy while it
        runs."""
        are_running = self._look_at_followers()
        return self._leader.check() if self._leader is not None else are_running

    def pids(self) -> list[int]:
        """Return the processes started for the servers, the leaders first."""
        leaders = self._leader.pids() if self._leader is not None else []
        return leaders + [pid for follower in self._followers for pid in follower.pids()]

    def stop(self) -> None:
        """End all processes; can be called twice. A leader ends its followers, too."""
        for follower in self._followers:
            follower.ask_to_end()
        deadline = time.monotonic() + STOP_GRACE_S
        if self._leader is not None:
            self._leader.stop()
        for follower in self._followers:
            follower.stop(max(0.0, deadline - time.monotonic()))
        for port in self._ports:
            port.release()

    def _look_at_followers(self) -> bool:
        return all([follower.look() for follower in self._followers])


def _followers(
    config: Config, log_dir: Path, first_gpu: int, name: str, node: ServerNode, make: ServerCommandMaker
) -> list[Follower]:
    """Return a node's followers, one per server; name: of the servers, before their number."""
    num_gpus = config.actor_rollout_ref.rollout.server.tensor_model_parallel_size // node.num_nodes
    gpus = assign_gpus(len(node.addresses), num_gpus, first_gpu)
    starts = RunFolder.of(config.trainer).server_starts
    followers = []
    for i in range(len(node.addresses)):
        server, process = f"{name}-{i}", f"{name}-{i}-node-{node.rank}"
        # SGLang answers there that it lives, and nothing else: any port, for this machine alone
        command = node.command(i, make(config, LOOPBACK, 0, gpus[i]))
        orders = FollowedOrders(starts / server, node.rank)
        followers.append(Follower(process, command, Path(log_dir) / f"{process}.log", orders))
    return followers
