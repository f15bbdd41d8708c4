"""Preflights of several nodes, all on this machine: python preflight_worker.py FOLDER. The output
of node I of job NAME is in FOLDER/NAME-I.log; the exit codes are printed as JSON.

Every node is a fork of this process, which has imported torch:
the import takes longer than the preflights.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from launch.preflight import __main__ as preflight
from launch.preflight import machine
from tests.helpers import free_port

ONE_SERVER_NODE = ("trainer.nnodes=2", "actor_rollout_ref.rollout.server.nnodes=1")
NO_TENSOR_PARALLEL = (
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.sequence_parallel=false",
)
FOUR_TRAINERS = ("trainer.nnodes=4", *NO_TENSOR_PARALLEL)
RECIPE_WITH_A_SERVER_NODE = (*NO_TENSOR_PARALLEL, "trainer.nnodes=1", "actor_rollout_ref.rollout.server.nnodes=1")
SERVERS_OF_TWO_NODES = (
    "trainer.nnodes=2",
    "actor_rollout_ref.rollout.server.nodes_per_server=2",
    "actor_rollout_ref.rollout.server.nnodes=2",
    "actor_rollout_ref.rollout.server.tensor_model_parallel_size=4",
)
TWO_SERVERS_OF_TWO_NODES = (
    *NO_TENSOR_PARALLEL,
    "trainer.nnodes=1",
    "actor_rollout_ref.rollout.server.num_servers=2",
    "actor_rollout_ref.rollout.server.nodes_per_server=2",
    "actor_rollout_ref.rollout.server.nnodes=4",
    "actor_rollout_ref.rollout.server.tensor_model_parallel_size=2",
)
GIVEN_SERVER = "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:1]"


def other_sglang() -> None:
    versions = machine.versions()
    machine.versions = lambda: versions | {"sglang": "0.5.19"}


def wrong_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nope0"


def slow_network() -> None:
    all_reduce = dist.all_reduce

    def slowly(*arguments: object) -> object:
        time.sleep(0.4)
        return all_reduce(*arguments)

    dist.all_reduce = slowly


def impatient() -> None:
    machine._SHARED_S = 1.0


@dataclass(frozen=True)
class Job:
    """roles: of the nodes, one letter each. troubles: node -> its fault.
    of_node: node -> its own words."""

    roles: str
    overrides: Sequence[str]
    options: Sequence[str] = ("--server-hosts", "127.0.0.1")
    troubles: dict[int, Callable[[], None]] = field(default_factory=dict)
    of_node: dict[int, Sequence[str]] = field(default_factory=dict)
    absent: Sequence[int] = ()


JOBS = {
    "well": Job("ttss", SERVERS_OF_TWO_NODES, ("--server-hosts", "127.0.0.1,127.0.0.1")),
    "version": Job("tts", ONE_SERVER_NODE, troubles={2: other_sglang}),
    "folder": Job(
        "tts", ONE_SERVER_NODE, troubles={1: impatient}, of_node={1: ("--shared", "/tmp/preflight-elsewhere")}
    ),
    "missing": Job(
        "tts", ONE_SERVER_NODE, ("--meeting-timeout", "20", "--node-names", "node0,node1,node2"), absent=(1,)
    ),
    "http": Job("tts", ONE_SERVER_NODE, ("--server-hosts", "127.0.0.2")),
    "roles": Job("ttt", ("trainer.nnodes=2",)),
    "given": Job("t", (*RECIPE_WITH_A_SERVER_NODE, GIVEN_SERVER), ()),
    "replay": Job("t", (*RECIPE_WITH_A_SERVER_NODE, "trainer.replay=batches"), ()),
    "interface": Job("tttt", FOUR_TRAINERS, (), {2: wrong_interface}),
    "server link": Job(
        "tssss", TWO_SERVERS_OF_TWO_NODES, ("--server-hosts", ",".join(["127.0.0.1"] * 4)), {3: wrong_interface}
    ),
    "slow": Job("tttt", FOUR_TRAINERS, ("--min-bandwidth", "0.02"), {1: slow_network}),
    "all slow": Job("tts", ONE_SERVER_NODE, ("--server-hosts", "127.0.0.1", "--min-bandwidth", "1e6")),
}


def start(folder: Path, name: str, job: Job, index: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 99
    try:
        os.environ["SLURMD_NODENAME"] = f"node{index}"
        output = os.open(folder / f"{name}-{index}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        job.troubles.get(index, lambda: None)()
        role = {"t": "trainer", "s": "server"}[job.roles[index]]
        words = ["--config", "configs/demo.yaml", "--role", role, "--node-index", str(index)]
        words += ["--num-nodes", str(len(job.roles)), "--rendezvous", f"127.0.0.1:{port}"]
        words += ["--shared", str(folder / f"{name}-shared"), *job.options, *job.of_node.get(index, ())]
        code = preflight.main([*words, "trainer.n_procs_per_node=1", *job.overrides])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    folder, started = Path(sys.argv[1]), {}
    for name, job in JOBS.items():
        port = free_port()
        nodes = [index for index in range(len(job.roles)) if index not in job.absent]
        started[name] = [start(folder, name, job, index, port) for index in nodes]
    ends = {name: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] for name, pids in started.items()}
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
