"""The plan of a Slurm job, made only from Slurm's variables and the config: roles, ports, steps and
command lines."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.slurm.progress import BEGINNING, Progress
from megatron_dapo.checks.colocated_checks import given_servers
from megatron_dapo.commands.plan.cost import LEAST_RESTARTS
from megatron_dapo.common.addresses import LOOPBACK
from megatron_dapo.common.ends import EndFolder
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.derived import (
    gpus_per_server_node,
    servers_per_node,
    shares_gpus,
    starts_reward_model,
    starts_servers,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import server_key_file

PREFLIGHT, SERVERS, TRAINER = "preflight", "servers", "trainer"
ROLES = (PREFLIGHT, SERVERS, TRAINER)
KILLED_AS_ONE = (PREFLIGHT, TRAINER)  # their tasks wait for one another, and are useless singly
PLAN_FILE = "plan.json"

# Below 32768, Linux's first port of outgoing connections; a block for each of 384 consecutive jobs:
# of the trainer's rendezvous, of the preflight's, of the meetings of servers' processes over nodes,
# then of the servers.
_FIRST_PORT, _NUM_JOBS, _PORTS_PER_JOB = 20000, 384, 32
_TRAINER_PORT, _PREFLIGHT_PORT, _MEETING_PORT, _SERVER_PORT = 0, 1, 2, 8
_SERVER_GRACE_S = 60.0  # for the servers' starters, which know more about an unhealthy server


@dataclass(frozen=True)
class Allocation:
    """Slurm's allocation to the job."""

    job_id: int
    nodes: tuple[str, ...]
    """In the order of `scontrol show hostnames`."""
    restart_count: int = 0
    """Requeues so far."""
    gpus_per_node: int | None = None
    """None if Slurm counts none (no GRES), so that their number is unknown here."""
    time_limit_s: int | None = None
    """Of this attempt; None if Slurm does not say."""

    @classmethod
    def of(cls, environment: Mapping[str, str], nodes: Sequence[str]) -> "Allocation":
        gpus = environment.get("SLURM_GPUS_ON_NODE", "")
        times = [environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END")]
        start, end = (int(time) if time.isdigit() else 0 for time in times)
        return cls(
            job_id=int(environment["SLURM_JOB_ID"]),
            nodes=tuple(nodes),
            restart_count=int(environment.get("SLURM_RESTART_COUNT") or 0),
            gpus_per_node=int(gpus) if gpus.isdigit() else None,
            time_limit_s=end - start if 0 < start < end else None,
        )

    @classmethod
    def imagined(cls, config: Config) -> "Allocation":
        """Return the nodes of a job of the config's size, for a dry run outside Slurm."""
        return cls(0, tuple(f"node{i}" for i in range(1, sum(_own_nodes(config)) + 1)))

    @property
    def attempt(self) -> str:
        return f"attempt-{self.job_id}-{self.restart_count}"


@dataclass(frozen=True)
class JobPlan:
    """One attempt of a job."""

    job_id: int
    restart_count: int
    trainer_nodes: tuple[str, ...]
    """First in the allocation."""
    server_nodes: tuple[str, ...]
    """After the trainer's nodes; the same nodes for servers that share its GPUs."""
    n_procs_per_node: int
    servers_per_node: int
    run: str
    """Absolute folder."""
    logs: str
    """Absolute folder, with the resolved config."""
    total_steps: int
    start_step: int = 0
    """Finished rollout steps of the newest checkpoint at the start of the attempt."""
    start_groups: int = 0
    """Finished groups of the next step at that time."""
    start_tokens: int = 0
    """Tokens of its unfinished groups."""
    server_timeout_s: float = 0.0
    """Time for the servers to become healthy."""
    server_key_file: str = ""
    """With the key that the servers require."""
    min_bandwidth: float | None = None
    """The preflight's floor of the all-reduce in GB/s; None: its default."""
    reward_model_node: str = ""
    """The server node that also serves the reward model; empty if the job starts none."""
    nodes_per_server: int = 1
    """Neighbouring server nodes that make servers together; the first of them leads."""
    max_restarts: int = LEAST_RESTARTS
    """Allowed requeues."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.trainer_nodes + self.server_nodes))

    @property
    def ends(self) -> EndFolder:
        """Return the folder that records how the processes of this attempt ended."""
        return EndFolder(RunFolder(Path(self.run)).ends, start=self.logs)

    @property
    def config_file(self) -> str:
        return f"{self.logs}/config.yaml"

    @property
    def server_urls(self) -> list[str]:
        """Return the URLs of the servers: of their leaders."""
        ports = [self.port(_SERVER_PORT) + i for i in range(self.servers_per_node)]
        return [f"http://{node}:{port}" for node in self.server_nodes[:: self.nodes_per_server] for port in ports]

    @property
    def reward_model_url(self) -> str | None:
        """Return the URL of the reward model's server: on the port after the others of its node."""
        if not self.reward_model_node:
            return None
        return f"http://{self.reward_model_node}:{self.port(_SERVER_PORT + self.servers_per_node)}"

    def port(self, offset: int) -> int:
        return _FIRST_PORT + _PORTS_PER_JOB * (self.job_id % _NUM_JOBS) + offset

    def of_role(self, role: str) -> tuple[str, ...]:
        """Return the nodes with a process of a role."""
        return {PREFLIGHT: self.nodes, SERVERS: self.server_nodes, TRAINER: self.trainer_nodes}[role]

    def step(self, role: str) -> list[str]:
        """Return the arguments of srun: one task on each node of the role, with the use of the
        whole node.

        --overlap and --mem=0: a second step on a node with one already. --cpu-bind=none: one task
        starts many processes. --wait=0: the end of a task ends no other, at any WaitTime of the
        cluster. A failed trainer or preflight takes its step with it; with several nodes of servers
        the others continue.
        """
        nodes = self.of_role(role)
        return [
            f"--job-name={role}",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}",
            *("--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--input=none", "--wait=0"),
            f"--kill-on-bad-exit={1 if role in KILLED_AS_ONE else 0}",
            f"--output={self.logs}/{role}-%N.log",
        ]

    def command(self, role: str, node: str, python: str = sys.executable) -> list[str]:
        """Return the command of a role's task on a node."""
        index = self.of_role(role).index(node)
        makers = {PREFLIGHT: self._preflight, SERVERS: self._servers, TRAINER: self._trainer}
        return [python, "-m", *makers[role](index, node)]

    def _preflight(self, index: int, node: str) -> Iterator[str]:
        yield from ("launch.preflight", "--config", self.config_file, "--shared", self.run)
        is_server = node in self.server_nodes
        yield from ("--role", "server" if node not in self.trainer_nodes else "both" if is_server else "trainer")
        yield from ("--node-index", str(index), "--num-nodes", str(len(self.nodes)))
        yield from ("--rendezvous", f"{self.nodes[0]}:{self.port(_PREFLIGHT_PORT)}")
        yield from ("--node-names", ",".join(self.nodes))
        if self.server_nodes:
            yield from ("--server-hosts", ",".join(self.server_nodes), "--http-port", str(self.port(_SERVER_PORT)))
        if self.min_bandwidth is not None:
            yield from ("--min-bandwidth", str(self.min_bandwidth))
        ports = [self.port(_TRAINER_PORT)] if index == 0 else []
        if self.nodes_per_server > 1 and node in self.server_nodes[:: self.nodes_per_server]:
            ports += [self.port(_MEETING_PORT) + i for i in range(self.servers_per_node)]
        if ports:
            yield from ("--ports", ",".join(map(str, ports)))
        if node == self.reward_model_node:
            yield "--reward-model"

    def _servers(self, index: int, node: str) -> Iterator[str]:
        yield from ("launch.sglang_server", "--config", self.config_file, "--node", node)
        yield from ("--first-port", str(self.port(_SERVER_PORT)), "--log-dir", self.logs)
        if self.nodes_per_server > 1:
            first = index - index % self.nodes_per_server
            group = self.server_nodes[first : first + self.nodes_per_server]
            yield from ("--server-nodes", ",".join(group), "--meeting-port", str(self.port(_MEETING_PORT)))
        if node == self.reward_model_node:
            yield from ("--serve", "both")

    def _trainer(self, index: int, _: str) -> Iterator[str]:
        """Yield the arguments that start a trainer node's ranks with a static rendezvous.

        Rank 0 is on the first node, and no node looks for itself among equal names.
        """
        yield from ("launch.torchrun", f"--nnodes={len(self.trainer_nodes)}", f"--node-rank={index}")
        yield from (f"--nproc-per-node={self.n_procs_per_node}", "--max-restarts=0")
        yield from (f"--master-addr={self.trainer_nodes[0]}", f"--master-port={self.port(_TRAINER_PORT)}")
        yield from ("-m", "launch.rank", "--log-dir", self.logs)
        yield from ("megatron_dapo", "train", "--config", self.config_file)

    def shell(self) -> str:
        """Return shell code for the body: variables, and srun's arguments of each role as
        arrays."""
        lines = [f"RUN={shlex.quote(self.run)}", f"LOGS={shlex.quote(self.logs)}"]
        lines += [f"HEAD_NODE={self.trainer_nodes[0]}", f"NUM_SERVER_NODES={len(self.server_nodes)}"]
        lines += [f"{role.upper()}_STEP=({shlex.join(self.step(role))})" for role in ROLES if self.of_role(role)]
        return "\n".join(lines) + "\n"

    def text(self) -> str:
        """Return the plan for the user: roles, nodes and their processes."""
        lines = [f"Job {self.job_id}, restart {self.restart_count}" if self.job_id else "Nodes, with imagined names"]
        counts = {TRAINER: (self.n_procs_per_node, "rank"), SERVERS: (self.servers_per_node, "server")}
        for role, (count, what) in counts.items():
            if nodes := self.of_role(role):
                per_node = f"{count} {what}{'' if count == 1 else 's'}"
                over = self.nodes_per_server if role == SERVERS else 1
                each = f"{len(nodes) // over} groups of {over} nodes" if over > 1 else len(nodes)
                lines.append(f"  {role:<10}{per_node} on each of {each}: {' '.join(nodes)}")
        if self.reward_model_node:
            lines.append(f"  {'':<10}1 server of the reward model on {self.reward_model_node}")
        lines += [f"  {'logs':<10}{self.logs}", f"  {'start':<10}step {self.start_step} of {self.total_steps}"]
        for role in (role for role in ROLES if self.of_role(role)):
            node = self.of_role(role)[0]
            lines += [f"{role}, on {node}:", f"  srun {shlex.join(self.step(role))}"]
            lines.append(f"    {shlex.join(self.command(role, node, 'python'))}")
        return "\n".join(lines)

    def write(self) -> None:
        """Write plan.json for the nodes' tasks, and plan.sh for the body."""
        write_whole(Path(self.logs) / PLAN_FILE, json.dumps(asdict(self), indent=1))
        write_whole(Path(self.logs) / "plan.sh", self.shell())

    @classmethod
    def read(cls, path: str | Path) -> "JobPlan":
        """Read the file of `write`."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)


def _own_nodes(config: Config) -> tuple[int, int]:
    """Return a config's numbers of trainer nodes, and of nodes for servers alone: 0 if servers are
    given, replaced by dumped batches, or share the trainer's GPUs."""
    return config.trainer.nnodes, config.actor_rollout_ref.rollout.server.nnodes if starts_servers(config) else 0


def make_plan(
    config: Config,
    allocation: Allocation,
    start: Progress = BEGINNING,
    min_bandwidth: float | None = None,
    max_restarts: int = LEAST_RESTARTS,
) -> JobPlan:
    """Return the plan. Raise UserError if the config does not fit Slurm's allocation."""
    num_trainers, num_servers = _own_nodes(config)
    sentences = list(_mistakes(config, allocation))
    if sentences:
        raise UserError(sentences)
    run = RunFolder.of(config.trainer).path.absolute()
    server = config.actor_rollout_ref.rollout.server
    server_nodes = allocation.nodes if shares_gpus(config) else allocation.nodes[num_trainers:]
    return JobPlan(
        job_id=allocation.job_id,
        restart_count=allocation.restart_count,
        trainer_nodes=allocation.nodes[:num_trainers],
        server_nodes=server_nodes,
        n_procs_per_node=config.trainer.n_procs_per_node,
        servers_per_node=servers_per_node(config) if server_nodes else 0,
        run=str(run),
        logs=str(run / "logs" / allocation.attempt),
        total_steps=config.trainer.total_training_steps,
        start_step=start.step,
        start_groups=start.num_groups,
        start_tokens=start.num_tokens,
        server_key_file=str(server_key_file(config)) if server_nodes else "",
        server_timeout_s=server.startup_timeout_s * (1 + server.max_restarts) + _SERVER_GRACE_S,
        min_bandwidth=min_bandwidth,
        reward_model_node=allocation.nodes[num_trainers] if starts_reward_model(config) else "",
        nodes_per_server=server.nodes_per_server,
        max_restarts=max_restarts,
    )


def own_overrides(plan: JobPlan, config: Config) -> list[str]:
    """Return the job's overrides of the config: absolute folders, and the meeting of trainer and
    servers. A requeued job resumes, for any first value of `trainer.resume`."""
    values: dict[str, str | int] = {"trainer.run_dir": plan.run, "trainer.log_dir": plan.logs}
    rollout = "actor_rollout_ref.rollout"
    if plan.server_nodes:
        values[f"{rollout}.server_urls_file"] = f"{plan.run}/servers.txt"
        values[f"{rollout}.server_api_key_file"] = plan.server_key_file
        if config.actor_rollout_ref.rollout.server.host == LOOPBACK:
            # other nodes have to reach them
            values[f"{rollout}.server.host"] = "0.0.0.0"
    else:
        # counted like its processes: the recipe's servers are not started if servers or batches are
        # given
        values[f"{rollout}.server.nnodes"] = 0
    if plan.reward_model_url:
        values["reward.model.url"] = plan.reward_model_url
        values["reward.model.api_key_file"] = plan.server_key_file
    if plan.restart_count and config.trainer.resume == "never":
        values["trainer.resume"] = "auto"
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _mistakes(config: Config, allocation: Allocation) -> Iterator[str]:
    server = config.actor_rollout_ref.rollout.server
    num_given = len(allocation.nodes)
    num_trainers, num_servers = _own_nodes(config)
    yield from given_servers(config)
    if starts_servers(config) and server.nnodes == 0 and not shares_gpus(config):
        yield (
            "actor_rollout_ref.rollout.server.nnodes is 0, but in a Slurm job servers have nodes of their own or share "
            "the trainer's; set it to 1 or more, set actor_rollout_ref.hybrid_engine to true, or run `python -m "
            "launch.local` on the one node."
        )
    elif num_given != num_trainers + num_servers:
        yield (
            f"Slurm gave {num_given} nodes ({' '.join(allocation.nodes)}), but trainer.nnodes {num_trainers} + "
            f"actor_rollout_ref.rollout.server.nnodes {num_servers} is {num_trainers + num_servers}; make them agree "
            f"(sbatch --nodes={num_trainers + num_servers})."
        )
    has_reward_model = starts_reward_model(config)
    if has_reward_model and not num_servers:
        yield (
            "reward.model.path is given without reward.model.url, but a job without server nodes starts no server of a "
            "reward model; start one (`python -m launch.sglang_server --serve reward-model`), and give its URL."
        )
    count = servers_per_node(config) + has_reward_model
    if count > _PORTS_PER_JOB - _SERVER_PORT:
        yield (
            f"{count} servers on a node (actor_rollout_ref.rollout.server.num_servers x nodes_per_server / nnodes"
            f"{', and the reward model' if has_reward_model else ''}) are more than the "
            f"{_PORTS_PER_JOB - _SERVER_PORT} ports of a job; use fewer."
        )
    if server.nodes_per_server > 1 and count - has_reward_model > _SERVER_PORT - _MEETING_PORT:
        yield (
            f"{count - has_reward_model} servers on the same {server.nodes_per_server} nodes "
            f"(actor_rollout_ref.rollout.server.nodes_per_server) are more than the {_SERVER_PORT - _MEETING_PORT} "
            f"ports of a job for their meetings; use fewer."
        )
    gpus = allocation.gpus_per_node
    if gpus is None:
        return
    if config.trainer.n_procs_per_node > gpus:
        yield (
            f"trainer.n_procs_per_node is {config.trainer.n_procs_per_node}, but Slurm gave {gpus} GPUs per node; "
            f"ask for more (sbatch --gpus-per-node) or start fewer ranks."
        )
    needed = servers_per_node(config) * gpus_per_server_node(config)
    words = (
        f"{servers_per_node(config)} servers x {gpus_per_server_node(config)} GPUs per server node "
        f"(actor_rollout_ref.rollout.server)"
    )
    if has_reward_model:  # on the first of these nodes
        needed += config.reward.model.tensor_model_parallel_size
        words += f" and {config.reward.model.tensor_model_parallel_size} of the reward model (reward.model)"
    if num_servers and needed > gpus:
        yield (
            f"{words} need {needed} GPUs, but Slurm gave {gpus} per node; ask for more "
            f"(sbatch --gpus-per-node) or start fewer servers."
        )
