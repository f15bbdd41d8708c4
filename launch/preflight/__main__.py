"""python -m launch.preflight: checks this machine, or as one of several processes the nodes of a
job."""

import argparse
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # retried connections are no news

from launch.command_line import checked_config, parse, parser
from launch.preflight import all_reduce, gpus, http, machine
from launch.preflight.nodes import NodeFinding, PreflightError, PreflightNodes
from launch.preflight.report import table
from launch.process_names import preflight_name
from megatron_dapo.common import ends
from megatron_dapo.common.addresses import LOOPBACK, node_name
from megatron_dapo.common.ends import EndKind
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.derived import (
    gpus_per_server_node,
    machines_per_server,
    servers_per_node,
    shares_gpus,
    starts_servers,
    uses_servers,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import given_server_key

ROLES = ("trainer", "server", "both")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0; 1 for an unfit node (the last line has node, reason and cure); 2 for
    mistakes of the user."""
    arguments, overrides = parse(_parser(), argv)
    ends.begin(preflight_name(node_name()), ends.own_folder())
    try:
        config = checked_config(arguments.config, overrides, check_files=False)
        _check_arguments(arguments)
    except UserError as error:
        ends.record_end(EndKind.USER_ERROR, USER_ERROR_EXIT_CODE, error.sentences[0])
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    num_ranks, num_nodes = _ranks_here(config, arguments.role)
    rounds = [all_reduce.AllReduceRanks(num_ranks) for _ in range(all_reduce.num_fork_rounds(num_nodes)) if num_ranks]
    try:
        return Preflight(config, arguments, rounds).run()
    except PreflightError as error:
        ends.record_end(EndKind.FAILED, FAILED_EXIT_CODE, str(error))
        print(f"preflight: {error}", flush=True)
        return FAILED_EXIT_CODE
    finally:
        for ranks in rounds:
            ranks.end()


def _parser() -> argparse.ArgumentParser:
    options_parser = parser("launch.preflight", "Check that this machine, or every node of a job, is fit for the run.")
    many = options_parser.add_argument_group("several nodes", "One process per node, all started at the same time.")
    many.add_argument("--role", choices=ROLES, default="both", help="this node's role (both)")
    many.add_argument("--node-index", type=int, default=0, metavar="I", help="this node's number; 0 prints the table")
    many.add_argument("--num-nodes", type=int, default=1, metavar="N")
    many.add_argument("--rendezvous", metavar="HOST:PORT", help="node 0's address for the others")
    many.add_argument("--node-names", type=_words, default=[], metavar="A,B,...", help="of all nodes, for messages")
    many.add_argument(
        "--server-hosts", type=_words, default=[], metavar="A,B,...", help="server nodes as the trainer calls them"
    )
    options_parser.add_argument(
        "--shared", type=Path, metavar="DIR", help="folder that all nodes must see; else the run folder"
    )
    options_parser.add_argument(
        "--http-port", type=int, metavar="P", help="first port of each node's servers; else any"
    )
    options_parser.add_argument(
        "--ports", type=_numbers, default=[], metavar="P,...", help="further ports this node will use"
    )
    options_parser.add_argument(
        "--reward-model", action="store_true", help="this node's servers are followed by the reward model's"
    )
    options_parser.add_argument(
        "--min-bandwidth",
        type=float,
        metavar="GB/S",
        help="floor of the all-reduce's bus bandwidth; else "
        + ", ".join(f"{floor:g} with {backend}" for backend, floor in all_reduce.FLOOR_GB_S.items()),
    )
    options_parser.add_argument("--report", type=Path, metavar="FILE", help="node 0 writes the table there as JSON too")
    options_parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="deadline of every wait (120)"
    )
    options_parser.add_argument(
        "--meeting-timeout", type=float, default=600.0, metavar="S", help="but of the first, until all nodes came (600)"
    )
    return options_parser


def _ranks_here(config: Config, role: str) -> tuple[int, int]:
    """Return a node's ranks in an all-reduce, and the nodes of one: the trainer's, or those that
    serve together."""
    if role != "server":
        return config.trainer.n_procs_per_node, config.trainer.nnodes
    over = machines_per_server(config)
    return servers_per_node(config) * gpus_per_server_node(config) if over > 1 else 0, over


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.num_nodes > 1 and not arguments.rendezvous:
        raise UserError(f"--num-nodes {arguments.num_nodes} needs --rendezvous HOST:PORT, node 0's address.")
    if not 0 <= arguments.node_index < arguments.num_nodes:
        raise UserError(f"--node-index {arguments.node_index} is not below --num-nodes {arguments.num_nodes}.")


class Preflight:
    """The checks of one node, in step with the others': first the local ones, then those over a
    network."""

    def __init__(self, config: Config, arguments: argparse.Namespace, rounds: list[all_reduce.AllReduceRanks]) -> None:
        self._config = config
        self._arguments = arguments
        self._rounds = rounds
        count = arguments.num_nodes
        names = arguments.node_names
        guessed = names if len(names) == count else [f"node {index}" for index in range(count)]
        name = node_name()
        limits = arguments.timeout, arguments.meeting_timeout
        self._nodes = PreflightNodes(arguments.node_index, name, guessed, arguments.rendezvous, *limits)
        self._findings: list[NodeFinding] = []

    def run(self) -> int:
        nodes = self._nodes
        try:
            self._meet()
            self._machine()
            findings = self._gather("the checks of each node")
            if not any(finding.problem for finding in findings):
                self._network()
                findings = self._gather("the checks of the network")
        except PreflightError as error:
            raise nodes.stop(error.node, error.problem) from None
        except (OSError, UserError) as error:
            raise nodes.stop(nodes.name, f"the preflight failed ({error})") from error
        finally:
            nodes.leave()
        if nodes.index == 0:
            print(table(findings, nodes.names), flush=True)
            if self._arguments.report:
                write_whole(self._arguments.report, json.dumps(list(map(asdict, findings)), indent=1) + "\n")
        problems = [f"{finding.node}: {finding.problem}" for finding in findings if finding.problem]
        print("\n".join(f"preflight: {problem}" for problem in reversed(problems)) or "preflight: ok", flush=True)
        if not problems:
            ends.record_end(EndKind.DONE, 0)
            return 0
        ends.record_end(EndKind.FAILED, FAILED_EXIT_CODE, problems[0])
        return FAILED_EXIT_CODE

    def _add(self, check: str, result: machine.Result, node: str | None = None) -> None:
        self._findings.append(NodeFinding(node or self._nodes.name, check, result.found, result.problem))

    def _gather(self, what: str) -> list[NodeFinding]:
        findings_here = [vars(finding) for finding in self._findings]
        per_node = self._nodes.gather(what, findings_here)
        findings = [NodeFinding(**fields) for node in per_node for fields in node]
        checks = list(dict.fromkeys(finding.check for finding in findings))
        return sorted(findings, key=lambda finding: checks.index(finding.check))

    def _meet(self) -> None:
        """Exchange names, roles and versions of all; node 0's token."""
        nodes = self._nodes
        arguments = self._arguments
        shared = (arguments.shared or RunFolder.of(self._config.trainer).path).absolute()
        facts = {
            "name": nodes.name,
            "role": arguments.role,
            "versions": machine.versions(),
            "gpus": gpus.are_expected(),
            "token": secrets.token_hex(4),
        }
        per_node = nodes.meet(facts)
        nodes.names[:] = [node["name"] for node in per_node]
        self._trainers = [index for index, node in enumerate(per_node) if node["role"] != "server"]
        self._servers = [index for index, node in enumerate(per_node) if node["role"] != "trainer"]
        # in a Slurm job's config, a file names the started servers, as if they were given
        has_server_nodes = any(node["role"] == "server" for node in per_node)
        self._starts_servers = has_server_nodes or starts_servers(self._config) or shares_gpus(self._config)
        self._token = per_node[0]["token"]
        self._uses_gpus = any(node["gpus"] for node in per_node)
        self._folder = machine.SharedFolder(shared, self._token)
        self._check_roles()
        self._add("versions", _compare(per_node, nodes.index))

    def _check_roles(self) -> None:
        config = self._config
        nodes = self._nodes
        num_servers = config.actor_rollout_ref.rollout.server.nnodes if self._starts_servers else 0
        wanted = config.trainer.nnodes, num_servers
        there = len(self._trainers), len(self._servers)
        if there[0] != wanted[0] or (wanted[1] and there[1] != wanted[1]):
            servers = f"actor_rollout_ref.rollout.server.nnodes = {num_servers}" if num_servers else "no server nodes"
            raise nodes.stop(
                nodes.names[0],
                f"there are {there[0]} trainer and {there[1]} server nodes, the config wants trainer.nnodes = "
                f"{wanted[0]} and {servers}; start as many.",
            )

    def _machine(self) -> None:
        """Add the results of the local checks, and of those with node 0's file."""
        config = self._config
        arguments = self._arguments
        nodes = self._nodes
        written = self._folder.write() if nodes.index == 0 else None
        nodes.gather("the shared folder", None)
        if nodes.index == 0:
            self._add("shared folder", machine.Result(str(self._folder.folder), written))
        else:
            self._add("shared folder", self._folder.check(nodes.index, nodes.names[0]))
        nodes.gather("the shared folder's files", None)
        if nodes.index == 0:
            self._folder.clean()
        self._add("files", files := machine.files(config))
        self._add("GPUs", self._gpus())
        if shares_gpus(config) and self._uses_gpus:
            self._add("shared GPUs", gpus.sharing(config))
        self._add("compiler", gpus.compiler(self._uses_gpus))
        serves = self._starts_servers and arguments.role != "trainer"
        if serves and self._uses_gpus:
            self._add("CUDA compiler", gpus.cuda_compiler())
        if nodes.index == 0 and not files.problem:
            self._add("disk", machine.disk(config, RunFolder.of(config.trainer).path))
        self._add("scratch", machine.scratch())
        keys = config.actor_rollout_ref.rollout.agent
        if nodes.index == 0 and (keys.sandbox or machine.runs_programs(config)):
            self._add("sandbox", machine.sandbox(config))
        if nodes.index == 0 and keys.enable:
            self._add("gateways", machine.gateways(config))
        self._add("limits", machine.limits(config, self._uses_gpus))
        servers = servers_per_node(config) + arguments.reward_model if serves else 0
        numbers = list(machine.all_ports(arguments.http_port, servers, arguments.ports))
        self._add("ports", machine.ports(self._host() if serves else "", numbers))

    def _gpus(self) -> machine.Result:
        if self._uses_gpus and not gpus.are_expected():
            return machine.Result(
                "none",
                "has no GPUs that torch can use, other nodes have; look at the driver, or take it out of the job.",
            )
        return gpus.check(self._config, self._arguments.role, self._arguments.reward_model)

    def _network(self) -> None:
        backend = "nccl" if self._uses_gpus else "gloo"
        floor = self._arguments.min_bandwidth
        floor = all_reduce.FLOOR_GB_S[backend] if floor is None else floor
        groups, over = {"all-reduce": [self._trainers]}, machines_per_server(self._config)
        if self._starts_servers and self._servers and over > 1:  # neighbouring nodes make servers together
            starts = range(0, len(self._servers), over)
            groups["server all-reduce"] = [self._servers[first : first + over] for first in starts]
        for name, members in groups.items():
            result = all_reduce.check(self._nodes, name, members, self._rounds, backend, floor)
            if result.found:
                self._add(name, result)
        self._http()

    def _host(self) -> str:
        return self._config.actor_rollout_ref.rollout.server.host

    def _http(self) -> None:
        """Let every trainer node fetch a page from every server node, at the servers' first
        port."""
        nodes = self._nodes
        if not self._starts_servers:
            self._given_servers()
            return
        if not self._servers:
            return
        listener = None
        try:
            listener = self._listen() if nodes.index in self._servers else None
            ports = nodes.gather("listening", listener.port if listener else None)
            faults = self._fetch(ports) if nodes.index in self._trainers else {}
            per_node = nodes.gather("HTTP", faults)
        finally:
            if listener:
                listener.close()
        self._add_http(per_node)

    def _listen(self) -> http.Listener:
        port = self._arguments.http_port or 0
        try:
            return http.Listener(self._host(), port, self._token)
        except OSError as error:
            problem = (
                f"cannot listen on {self._host()}:{port} ({error.strerror}); set actor_rollout_ref.rollout.server.host "
                "to an address of this node, or 0.0.0.0."
            )
            raise PreflightError(self._nodes.name, problem) from None

    def _hosts(self) -> dict[int, str]:
        """Return the index of each server node -> its host, as the trainer calls it."""
        hosts = self._arguments.server_hosts
        if self._nodes.count == 1:
            return {0: LOOPBACK}
        if len(hosts) == len(self._servers):
            return dict(zip(self._servers, hosts, strict=True))
        return {index: self._nodes.names[index] for index in self._servers}

    def _fetch(self, ports: Sequence[int | None]) -> dict[int, str]:
        faults = {
            index: http.fault(f"http://{host}:{ports[index]}/", self._token) for index, host in self._hosts().items()
        }
        return {index: fault for index, fault in faults.items() if fault}

    def _add_http(self, per_node: Sequence[dict[str, str]]) -> None:
        nodes = self._nodes
        failed = {
            (trainer, int(server)): fault for trainer, faults in enumerate(per_node) for server, fault in faults.items()
        }
        failures = [
            f"{nodes.names[t]} -> {nodes.names[s]}: {f}" for (t, s), f in failed.items() if nodes.index in (t, s)
        ]
        is_culprit = nodes.index in http.find_culprits(failed, self._trainers, self._servers)
        summary = f"{len(self._servers)} server node{'s' if len(self._servers) > 1 else ''} reached"
        if nodes.index in self._trainers or is_culprit:
            problem = (
                f"HTTP fails ({'; '.join(failures)}); look at its firewall, its name in DNS, and at "
                f"actor_rollout_ref.rollout.server.host = {self._host()}."
            )
            self._add("HTTP", machine.Result("fails" if failures else summary, problem if is_culprit else None))

    def _given_servers(self) -> None:
        if self._nodes.index not in self._trainers or not uses_servers(self._config):
            return
        try:
            urls = ServerList.of_config(self._config.actor_rollout_ref.rollout).read()
            key = given_server_key(self._config)
        except UserError as error:
            self._add("HTTP", machine.Result("fails", str(error)))
            return
        # not /health, which SGLang answers without its key too
        faults = {url: http.fault(f"{url}/model_info", None, key) for url in urls}
        wrong = "; ".join(f"{url} ({fault})" for url, fault in faults.items() if fault)
        problem = f"does not reach {wrong} of the given servers; start them, or look at the network."
        self._add("HTTP", machine.Result(f"{len(urls)} given servers", problem if wrong else None))


def _compare(per_node: Sequence[dict], index: int) -> machine.Result:
    """Compare this node's versions with those of most nodes; in a tie, node 0's."""
    versions = per_node[index]["versions"]
    wrong = []
    for name, version in versions.items():
        usual = Counter(node["versions"][name] for node in per_node).most_common(1)[0][0]
        if version != usual:
            wrong.append(f"{name} {version}, the others {usual}")
    summary = ", ".join(f"{name} {version}" for name, version in versions.items())
    cure = f"has {'; '.join(wrong)}; use one environment, or one image, on all nodes."
    return machine.Result(summary, cure if wrong else None)


if __name__ == "__main__":
    sys.exit(main())
