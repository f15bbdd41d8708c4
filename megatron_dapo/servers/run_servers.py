"""A run's or an evaluation's SGLang servers on this machine: the rollout's, the reward model's."""

import json
import logging
from pathlib import Path

from megatron_dapo.common.heavy_packages import require_package
from megatron_dapo.config.derived import servers_per_node, starts_reward_model, starts_servers
from megatron_dapo.config.schema.actor_rollout_ref import ServerConfig
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.servers.several_nodes.nodes_supervisor import NodesSupervisor
from megatron_dapo.servers.several_nodes.server_node import NodeGroup
from megatron_dapo.servers.supervisor import ServerFailure, ServerSupervisor
from megatron_dapo.storage.model_folder import ModelFolder

log = logging.getLogger(__name__)


class RunServers:
    """The supervisors of a run's servers, used as one; see `ServerSupervisor`."""

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        *,
        rollout: bool,
        reward_model: bool,
        first_gpu: int = 0,
        first_port: int | None = None,
        node: str | None = None,
        group: NodeGroup | None = None,
    ) -> None:
        """Prepare the servers: of the rollout, of the reward model, or both. Raises UserError.

        Args:
            config: of the run.
            log_dir: folder of their log files.
            rollout, reward_model: start these.
            first_gpu: GPUs of this machine before it belong to the trainer alone; the reward
                model's follow the rollout's.
            first_port: the servers listen on it and the ports after it; by default on free ports.
            node: a part of the names of the servers and their log files, if several nodes share
                log_dir.
            group: of servers over several nodes, all of which are on this one otherwise.
        """
        suffix = f"-{node}" if node else ""
        self._rollout: ServerSupervisor | NodesSupervisor | None = None
        self._reward_model: ServerSupervisor | None = None
        if rollout:
            name = f"server-{group.names[0]}" if group else f"server{suffix}"
            if config.actor_rollout_ref.rollout.server.nodes_per_server > 1:
                self._rollout = NodesSupervisor(
                    config, log_dir, first_gpu=first_gpu, first_port=first_port, name=name, group=group
                )
            else:
                self._rollout = ServerSupervisor(config, log_dir, first_gpu=first_gpu, first_port=first_port, name=name)
            num_servers = servers_per_node(config)
            num_nodes = len(group.names) if group else 1  # without one, all of a server is here
            first_gpu += num_servers * config.actor_rollout_ref.rollout.server.tensor_model_parallel_size // num_nodes
            first_port = first_port + num_servers if first_port else None
        if reward_model:
            name = f"reward-model{suffix}"
            own = _of_reward_model(config)
            self._reward_model = ServerSupervisor(own, log_dir, first_gpu=first_gpu, first_port=first_port, name=name)

    @classmethod
    def of(cls, config: Config, log_dir: Path, first_gpu: int = 0) -> "RunServers":
        """Return the servers without a URL in the config; as the constructor."""
        require_package("sglang")
        rollout, reward_model = starts_servers(config), starts_reward_model(config)
        return cls(config, log_dir, rollout=rollout, reward_model=reward_model, first_gpu=first_gpu)

    @property
    def _all(self) -> list[ServerSupervisor | NodesSupervisor]:
        return [servers for servers in (self._rollout, self._reward_model) if servers is not None]

    @property
    def were_healthy(self) -> bool:
        """Return whether all of them were healthy at some time."""
        return all(servers.were_healthy for servers in self._all)

    @property
    def are_over(self) -> bool:
        """Return whether all servers here belong to leaders elsewhere, and were stopped for good."""
        return self._reward_model is None and isinstance(self._rollout, NodesSupervisor) and self._rollout.are_over

    @property
    def urls(self) -> list[str]:
        """Return the URLs of all of them, the reward model's last."""
        return [url for servers in self._all for url in servers.urls]

    @property
    def key_file(self) -> Path:
        """Return the file with the key demanded by all of them."""
        return self._all[0].key_file

    def pids(self) -> list[int]:
        """Return the processes started for them, the reward model's last."""
        return [pid for servers in self._all for pid in servers.pids()]

    def overrides(self) -> list[str]:
        """Return config overrides with these servers' URLs and key files."""
        named = self._rollout.overrides() if self._rollout else []
        if self._reward_model is not None:
            [url] = self._reward_model.urls
            keys = {"url": url, "api_key_file": str(self._reward_model.key_file)}
            named += [f"reward.model.{key}={json.dumps(value)}" for key, value in keys.items()]
        return named

    def start(self) -> None:
        """Start all of them; do not wait."""
        for servers in self._all:
            servers.start()

    def check(self) -> bool:
        """Look at every server once and restart the failed ones; return whether all are healthy.

        Raises ServerFailure if the rollout has no server left, or one was never healthy. Without
        its reward model a run ends by itself, once too few responses got a verdict.
        """
        if self._reward_model is None:
            return self._rollout is None or self._rollout.check()
        try:
            is_healthy = self._reward_model.check()
        except ServerFailure as error:
            if not self._reward_model.were_healthy:
                raise
            log.error("The reward model is lost: %s", error)
            self._reward_model.stop()
            self._reward_model = None
            is_healthy = False
        return (self._rollout is None or self._rollout.check()) and is_healthy

    def stop(self) -> None:
        """End all of them."""
        for servers in self._all:
            servers.stop()


def _of_reward_model(config: Config) -> Config:
    """Return the config of a run with only the reward model's server.

    Raises UserError for another kind of model.
    """
    model = config.reward.model
    folder = ModelFolder.of(str(model.path)).hf
    own = config.actor_rollout_ref.rollout.server
    # SGLang knows no token classifier; with the label of the last token it is a sequence classifier
    name = architecture_of(str(folder)).replace("ForTokenClassification", "ForSequenceClassification")
    server = ServerConfig(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        host=own.host,
        extra_args=["--json-model-override-args", json.dumps({"architectures": [name]})],
        startup_timeout_s=own.startup_timeout_s,
        max_restarts=own.max_restarts,
    )
    sections = config.actor_rollout_ref
    rollout = sections.rollout.model_copy(update={"server": server, "quantization": None})
    served = sections.model.model_copy(update={"path": str(folder)})
    actor = sections.actor.model_copy(update={"router_replay": "off"})
    # it has GPUs of its own
    changed = {"rollout": rollout, "model": served, "actor": actor, "hybrid_engine": False}
    return config.model_copy(update={"actor_rollout_ref": sections.model_copy(update=changed)})
