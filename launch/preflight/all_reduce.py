"""All-reduces over the ranks of the trainer, and of each group of nodes that serve together: do
they work, are they right and fast enough? If not, on which node is the fault?"""

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.preflight.machine import Result
from launch.preflight.nodes import PreflightNodes
from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.common.signals import reset_signals

FLOOR_GB_S = {"nccl": 5.0, "gloo": 0.005}
"""Lowest bus bandwidth (GB/s) of a sound network. Below it are NCCL on a management network of
10 Gb/s or less, and gloo on one of 50 Mb/s. A healthy fabric is far above it; --min-bandwidth
sets it."""

NUM_BYTES = {"nccl": 256 * 2**20, "gloo": 4 * 2**20}
SOCKETS = "Socket"
"""NCCL's name of its fallback network: TCP, by way of the processors."""

_NETWORK = re.compile(r"NCCL INFO (?:Using network (.+)|Assigned NET plugin (.+) to comm)\s*$", re.MULTILINE)
_NUM_ROUNDS = 4  # the first joins the peers; the best of the others counts
_PAIR_ROUNDS = 3
_POLL_S = 0.05


@dataclass(frozen=True)
class AllReduceTask:
    """One rank's part of an all-reduce. key: unique to this all-reduce."""

    key: str
    address: tuple[str, int]
    rank: int
    world: int
    backend: str
    device: int
    timeout_s: float


class AllReduceRanks:
    """This node's ranks for one all-reduce: processes, since a rank that hangs in a collective must
    be killed. They are forked before this process has threads, and wait, so that torch is imported
    once."""

    def __init__(self, count: int) -> None:
        self.network = ""  # NCCL's choice, after a run
        context = multiprocessing.get_context("fork")
        self._ranks: list[tuple[Any, Connection]] = []
        for _ in range(count):
            own_end, rank_end = context.Pipe()
            process = context.Process(target=_serve, args=(rank_end, os.getpid()), daemon=True)
            process.start()
            rank_end.close()
            self._ranks.append((process, own_end))

    @property
    def count(self) -> int:
        return len(self._ranks)

    def run(self, tasks: Sequence[AllReduceTask], nodes: PreflightNodes) -> float | str:
        """Return the seconds of the all-reduce, or the error. Ends early if another node failed."""
        for (_, connection), task in zip(self._ranks, tasks, strict=True):
            connection.send(task)
        failed = f"{tasks[0].key}/failed"
        deadline = time.monotonic() + tasks[0].timeout_s
        answers: dict[int, tuple[float, str] | str] = {}
        while len(answers) < len(tasks):
            for index, (process, connection) in enumerate(self._ranks):
                if index not in answers and (connection.poll(0) or not process.is_alive()):
                    answers[index] = _receive(process, connection)
            errors = [answer for answer in answers.values() if isinstance(answer, str)]
            if errors:
                nodes.store.set(failed, "1")
                return errors[0]
            if nodes.store.check([failed]):
                return OTHERS
            if time.monotonic() > deadline:
                return f"no end within {tasks[0].timeout_s:g} s"
            time.sleep(_POLL_S)
        networks = [answer[1] for answer in answers.values() if not isinstance(answer, str)]
        self.network = SOCKETS if SOCKETS in networks else networks[0]
        return max(answer[0] for answer in answers.values() if not isinstance(answer, str))

    def end(self) -> None:
        for process, _ in self._ranks:
            process.kill()
        for process, _ in self._ranks:
            process.join()


OTHERS = "given up, since another node failed"


def num_fork_rounds(num_nodes: int) -> int:
    """Return the largest number of all-reduces of so many nodes: one, and if it is slow or fails,
    some between pairs of them."""
    return 1 + (min(_PAIR_ROUNDS, len(list(pairings(num_nodes)))) if num_nodes > 2 else 0)


def check(
    nodes: PreflightNodes,
    name: str,
    groups: Sequence[Sequence[int]],
    rounds: Sequence[AllReduceRanks],
    backend: str,
    floor_gb_s: float,
) -> Result:
    """Measure the all-reduce over the nodes of each group, seen from this node; only culprits get a
    `Result.problem`. The call is collective over all nodes.

    Args:
        name: of the groups, for the others' waits.
        groups: indices of nodes: the trainer's, or those that serve together. All have the same
            size.
        rounds: this node's ranks for each all-reduce, if it is in a group.
    """
    own = next((group for group in groups if nodes.index in group), ())
    probe = _Probe(nodes, name, backend, rounds[0].count if own else 0)
    if probe.world(groups[0]) == 1:
        return Result("one rank: nothing to reduce" if own else "")
    seconds = probe.run(f"ring/{own[0]}", own, rounds[0]) if own else None
    answers = nodes.gather(f"{name}: ring", seconds)
    network = rounds[0].network if own else ""
    has_no_fabric = len(own) > 1 and network == SOCKETS and not _are_sockets_wanted(os.environ)
    is_without_fabric = any(nodes.gather(f"{name}: network", has_no_fabric))
    verdicts = [probe.verdict(group, answers, floor_gb_s, network) for group in groups]
    faulty = [v for v in verdicts if v.fault and (v.failures or not is_without_fabric)]
    if len(groups[0]) > 2:
        culprits = probe.culprits([verdict.group for verdict in faulty], rounds[1:], floor_gb_s)
    else:
        culprits = [index for verdict in faulty for index in _without_pairs(verdict.failures, verdict.group)]
    if not own:
        return Result("")
    verdict = verdicts[groups.index(own)]
    if verdict not in faulty:
        return Result(verdict.summary, NO_FABRIC if has_no_fabric else None)
    if nodes.index not in culprits:
        return Result(verdict.summary)
    where = _where([index for index in culprits if index in own], own)
    return Result(verdict.summary, f"{verdict.fault}{where}; {_CURES[backend]}, or take the node out of the job.")


@dataclass(frozen=True)
class _Verdict:
    """What an all-reduce of a group was like. fault: None if it works and is fast enough."""

    group: Sequence[int]
    summary: str
    fault: str | None
    failures: Mapping[int, str]


NO_FABRIC = (
    "has no fabric that NCCL can use, so NCCL takes sockets (TCP) between the nodes; install libibverbs1 and "
    "ibverbs-providers (in a container too, with /dev/infiniband), or the plug-in of your fabric, or set "
    "NCCL_NET=Socket if there is none."
)


def _are_sockets_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the user asks for sockets, by NCCL's own variables."""
    return environment.get("NCCL_NET", "").lower() == SOCKETS.lower() or environment.get("NCCL_IB_DISABLE") == "1"


def network_of(log: str) -> str:
    """Return the network (IB, Socket, or a plug-in's name) in NCCL's log, or ""."""
    names = [first or second for first, second in _NETWORK.findall(log)]
    return SOCKETS if SOCKETS in names else names[-1] if names else ""


_CURES = {
    "nccl": "look at its network card and cable, and set NCCL_SOCKET_IFNAME and NCCL_IB_HCA",
    "gloo": "look at its network card and cable, and set GLOO_SOCKET_IFNAME",
}


def _without_pairs(failures: Mapping[int, str], group: Sequence[int]) -> list[int]:
    """Return the faulty nodes of two: the first to fail by itself, or both."""
    return [index for index, error in failures.items() if error != OTHERS] or list(group)


def _where(culprits: Sequence[int], group: Sequence[int]) -> str:
    if len(culprits) == len(group):
        return ", and no node is better than the others" if len(group) > 1 else ""
    return ", and it is so with every node that was tried" if len(group) > 2 else ""


def pairings(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of a tournament (circle method): in each every one of `count` meets one other,
    with odd count but one. In `count - 1` rounds (odd: `count`) everybody meets everybody."""
    order = list(range(count + count % 2))
    for _ in range(len(order) - 1):
        pairs = zip(order[: len(order) // 2], reversed(order[len(order) // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        order = [order[0], order[-1], *order[1:-1]]


def find_culprits(speeds: Mapping[tuple[int, int], float], floor: float) -> list[int]:
    """Return the nodes that are below the floor with every partner; if a pair is slow and none
    stands out, all of them. speeds: of pairs of nodes, 0 for a failed all-reduce."""
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), speed)
    return sorted(node for node, speed in best.items() if speed < floor) or sorted(best)


class _Probe:
    def __init__(self, nodes: PreflightNodes, name: str, backend: str, ranks_per_node: int) -> None:
        self._nodes = nodes
        self._name = name
        self._backend = backend
        self._timeout_s = nodes.timeout_s / 2  # the others wait for the answer of a rank that waits
        counts = nodes.gather(f"{name}: ranks per node", ranks_per_node)
        self._per_node = max(counts)

    def world(self, members: Sequence[int]) -> int:
        return self._per_node * len(members)

    def run(self, key: str, members: Sequence[int], ranks: AllReduceRanks) -> float | str:
        key, first = f"{self._name}: {key}", list(members).index(self._nodes.index) * self._per_node
        tasks = [
            AllReduceTask(key, self._nodes.address, first + i, self.world(members), self._backend, i, self._timeout_s)
            for i in range(self._per_node)
        ]
        try:
            return ranks.run(tasks, self._nodes)
        finally:
            ranks.end()

    def gb_s(self, members: Sequence[int], seconds: float) -> float:
        """Return the bus bandwidth: a link's load, independent of the number of ranks (nccl-tests,
        PERFORMANCE.md)."""
        world = self.world(members)
        return NUM_BYTES[self._backend] / seconds * 2 * (world - 1) / world / 1e9

    def verdict(self, group: Sequence[int], answers: Sequence[Any], floor: float, network: str) -> _Verdict:
        """Return the verdict on a group. answers: of all nodes, seconds or an error. network: of
        this node's group."""
        what = f"the all-reduce of {self.world(group)} ranks"
        failures = {index: answers[index] for index in group if isinstance(answers[index], str)}
        if failures:
            causes = sorted({error for error in failures.values() if error != OTHERS})
            return _Verdict(group, "failed", f"{what} failed ({'; '.join(causes)})", failures)
        speed = self.gb_s(group, max(answers[index] for index in group))
        how = f"{self._backend}, {network}" if network else self._backend
        summary = f"{speed:.3g} GB/s over {self.world(group)} ranks ({how}, at least {floor:g})"
        fault = None if speed >= floor else f"{what} reaches {speed:.3g} GB/s, {floor:g} are needed"
        return _Verdict(group, summary, fault, failures)

    def culprits(self, groups: Sequence[Sequence[int]], rounds: Sequence[AllReduceRanks], floor: float) -> list[int]:
        """Return the nodes at fault in each group, found by all-reduces between pairs of its nodes,
        many pairs at a time.

        The call is collective over all nodes.
        """
        speeds: dict[tuple[int, int], float] = {}
        for number, pairs in zip(range(_PAIR_ROUNDS), pairings(len(groups[0]) if groups else 0), strict=False):
            members = [[group[place] for place in pair] for group in groups for pair in pairs]
            own = next((pair for pair in members if self._nodes.index in pair), None)
            answer = self.run(f"pairs {number}/{own[0]}", own, rounds[number]) if own else None
            answers = self._nodes.gather(f"{self._name}: pairs {number}", answer)
            for pair in members:
                both = [answers[index] for index in pair]
                failed = any(isinstance(each, str) for each in both)
                speeds[pair[0], pair[1]] = 0.0 if failed else self.gb_s(pair, max(both))
        of_group = ({pair: speed for pair, speed in speeds.items() if pair[0] in group} for group in groups)
        return [culprit for of_pairs in of_group for culprit in find_culprits(of_pairs, floor)]


# ------------------------------------------------------------------------------------- in the ranks


def _receive(process: Any, connection: Connection) -> tuple[float, str] | str:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return f"a rank ended with exit code {process.exitcode}"


def _serve(connection: Connection, parent: int) -> None:
    end_with_parent(parent)
    reset_signals((signal.SIGTERM, signal.SIGINT))
    job = connection.recv()
    answer: tuple[float, str] | str
    try:
        answer = _all_reduce(job)
    except Exception as error:
        # gloo's place in its source
        text = re.sub(r"\[enforce fail at [^]]*] ", "", " ".join(str(error).split()))
        answer = text[:200] or type(error).__name__
    connection.send(answer)
    os._exit(0)  # leaving a group may hang


def _all_reduce(job: AllReduceTask) -> tuple[float, str]:
    """Return the seconds of one all-reduce, the best of several, and the network that NCCL took."""
    if job.backend != "nccl":
        return _seconds(job), ""
    settings = os.environ.get("NCCL_DEBUG"), os.environ.get("NCCL_DEBUG_FILE")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nccl.log")
        if not settings[1]:
            # a file of the user's own stays; NCCL reads this once, at its first use in this process
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(file)}
        seconds = _seconds(job)
        log = file.read_text(errors="replace") if file.exists() else ""
    if settings[0] and log:
        print(log, file=sys.stderr, flush=True)
    return seconds, network_of(log) or "network unknown"


def _seconds(job: AllReduceTask) -> float:
    """Return the seconds of one all-reduce, the best of several."""
    import torch
    import torch.distributed as dist

    from megatron_dapo.platform import nccl

    timeout = timedelta(seconds=job.timeout_s)
    shared = dist.TCPStore(*job.address, is_master=False, wait_for_workers=False, timeout=timeout)
    device = torch.device("cpu")
    if job.backend == "nccl":
        nccl.prepare()
        device = torch.device("cuda", job.device)
        torch.cuda.set_device(device)
    store = dist.PrefixStore(job.key, shared)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world, timeout=timeout)
    seconds = []
    for _ in range(_NUM_ROUNDS):
        tensor = torch.full((NUM_BYTES[job.backend] // 4,), float(job.rank + 1), device=device)
        expected = job.world * (job.world + 1) / 2
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if job.backend == "nccl":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if not bool((tensor == expected).all()):
            raise RuntimeError("the sum is wrong")
    return min(seconds[1:])
