"""Rank 0 puts servers on shared GPUs to sleep and wakes them: SGLang's deadly orders of calls never
happen."""

import asyncio
import threading
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.weight_sync import shared_leader
from megatron_dapo.weight_sync.leader import ServerLeader
from megatron_dapo.weight_sync.servers import ServerCalls
from megatron_dapo.weight_sync.shared_leader import REST, WEIGHTS, SharedLeader
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

pytestmark = pytest.mark.unit

ALL = {WEIGHTS, *REST}
CALLS = ("pause", "release_memory", "resume_memory", "begin_weight_update", "end_weight_update", "continue_")


class Server:
    """SGLang 0.5.23, as far as its life depends on the order of calls. `fails`: the calls that it
    does not answer, before or after it obeyed."""

    def __init__(self, url: str, lease: LeaseFolder) -> None:
        self.url, self.lease = url, lease
        self.fails: dict[str, bool] = {}
        self.deaths: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.is_dead, self.is_paused, self.has_session = False, False, False
        self.released: set[str] = set()
        self.version: int | str = "default"

    async def _call(self, name: str) -> bool:
        """Whether the call is obeyed; raises for one without an answer."""
        if self.is_dead:
            raise ConnectionError("refused")
        if name in self.fails:
            obeys = self.fails[name]
            if not obeys:
                raise TimeoutError("no answer")
        return True

    def _answer(self, name: str) -> None:
        if name in self.fails:
            raise TimeoutError("no answer")

    def _die(self, why: str) -> None:
        self.is_dead = True
        self.deaths.append(why)
        raise ConnectionError("it died")

    async def pause(self, mode: str) -> None:
        await self._call("pause")
        assert mode == "retract"
        self.is_paused = True
        self._answer("pause")

    async def release_memory(self, tags: Sequence[str]) -> None:
        await self._call("release_memory")
        if not self.is_paused:
            self._die("released while it ran")
        if set(tags) & self.released:
            self._die("released twice")
        self.released |= set(tags)
        self._answer("release_memory")

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await self._call("resume_memory")
        if not set(tags) <= self.released:
            self._die("resumed what was not released")
        if self.lease.read().holder is Holder.TRAINER:
            self._die("woken while the trainer has the GPUs")
        self.released -= set(tags)
        self._answer("resume_memory")

    async def begin_weight_update(self) -> None:
        await self._call("begin_weight_update")
        if self.has_session:
            raise ValueError("refused: a session is open")
        if WEIGHTS in self.released:
            self._die("weights without memory")
        self.has_session = True
        self._answer("begin_weight_update")

    async def end_weight_update(self) -> None:
        await self._call("end_weight_update")
        if not self.has_session:
            raise ValueError("refused: no session is open")
        self.has_session = False
        self._answer("end_weight_update")

    async def continue_(self) -> None:
        await self._call("continue_")
        if self.released:
            self._die("told to continue asleep")
        self.is_paused = False
        self._answer("continue_")

    async def weight_version(self) -> int | str:
        await self._call("weight_version")
        return self.version

    async def server_info(self) -> dict:
        return {"tp_size": 1}

    async def close(self) -> None:
        pass


class World:
    """Servers, their supervisor, and rank 0."""

    def __init__(self, folder: Path, num_servers: int) -> None:
        self.lease = LeaseFolder(folder / "lease")
        self.servers = {f"http://s{i}:1": Server(f"http://s{i}:1", self.lease) for i in range(num_servers)}
        self.calls = ServerCalls(self.servers.__getitem__)
        self.leader = SharedLeader(lambda: list(self.servers), self.calls, 20.0, 1.0, lambda why: None, self.lease)
        self._over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)
        self._turn, self._looking = 0, threading.Lock()
        self._supervisor.start()

    def _supervise(self) -> None:
        while not self._over.wait(0.002):
            self.look()

    def look(self) -> None:
        with self._looking:
            self._look()

    def _look(self) -> None:
        lease = self.lease.read()
        if lease.turn == self._turn:
            return
        for url in lease.condemned:
            self.servers[url].is_dead = True
        self._turn = lease.turn
        self.lease.answer("the", lease.turn, [url for url, server in self.servers.items() if server.is_dead])

    def push(self, version: int) -> list[str]:
        """As HandlePush: the members that got all buckets hold the version."""
        members = self.leader.pause((), Deadline(5.0))
        for url in members:
            if not self.servers[url].is_dead:
                self.servers[url].version = version
        confirmed = self.leader.commit(version, list(members), Deadline(5.0))
        self.leader.resume(confirmed, Deadline(5.0))
        return confirmed

    def close(self) -> None:
        self._over.set()
        self._supervisor.join()
        self.calls.close()


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(shared_leader, "_POLL_S", 0.002)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, 2)
    yield made
    made.close()


def test_a_server_sleeps_and_comes_back_with_all_its_memory(world):
    one = world.servers["http://s0:1"]
    world.leader.sleep(Deadline(5.0))
    assert one.is_paused and one.released == ALL and world.lease.read().holder is Holder.MOVING
    world.leader.give_to_trainer()
    assert world.push(1) == list(world.servers)
    assert not one.is_paused and not one.released and not one.has_session
    assert world.lease.read().holder is Holder.SERVERS and not world.lease.read().condemned


def test_a_server_that_does_not_fall_asleep_is_killed_before_the_trainer_goes_on(world):
    world.servers["http://s1:1"].fails = {"release_memory": False}
    world.leader.sleep(Deadline(5.0))
    assert world.servers["http://s1:1"].is_dead and not world.servers["http://s1:1"].deaths
    world.leader.give_to_trainer()
    assert world.push(1) == ["http://s0:1"]
    assert not world.lease.read().condemned, "it is dead: its restart must not be killed"


def test_without_a_supervisor_the_server_awake_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_leader, "KILL_S", 0.1)
    world = World(tmp_path, 1)
    world.close()
    world.calls = ServerCalls(world.servers.__getitem__)
    world.leader = SharedLeader(lambda: list(world.servers), world.calls, 20.0, 1.0, lambda why: None, world.lease)
    world.servers["http://s0:1"].fails = {"pause": False}
    with pytest.raises(WeightSyncError, match="neither sleep nor end.*http://s0:1"):
        world.leader.sleep(Deadline(5.0))
    world.calls.close()


Step = tuple[Sequence[tuple[int, str, bool]], Sequence[tuple[int, str, bool]], Collection[int]]
"""Faults while servers fall asleep (number, call, whether it obeys), others during the push, and
servers killed from outside in between."""


def check_steps(world: World, steps: Sequence[Step]) -> None:
    """Live through the steps: no living server holds memory or lacks it at the wrong time, or gets a
    call that ends it."""
    servers = list(world.servers.values())

    def set_faults(faults: Sequence[tuple[int, str, bool]]) -> None:
        for server in servers:
            server.fails = {}
        for number, name, obeys in faults:
            servers[number].fails[name] = obeys

    for version, (sleeping, pushing, killed) in enumerate(steps, 1):
        set_faults(sleeping)
        world.leader.sleep(Deadline(0.4))  # patience with one that may be starting: half
        for server in servers:
            assert server.is_dead or server.released == ALL, "it holds memory while the trainer trains"
        world.leader.give_to_trainer()
        for number in killed:
            servers[number].is_dead = True
        set_faults(pushing)
        world.push(version)
        world.look()
        for server in servers:
            assert server.is_dead or (not server.released and server.version == version)
            if server.is_dead:  # as its supervisor does when servers have the GPUs
                server.restart()
    assert not [death for server in servers for death in server.deaths]


fault = st.tuples(st.integers(0, 1), st.sampled_from(CALLS), st.booleans())
faults = st.lists(fault, max_size=3, unique_by=lambda one: one[:2])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(faults, faults, st.sets(st.integers(0, 1))), min_size=1, max_size=4))
def test_whatever_call_fails_no_living_server_gets_a_deadly_one(tmp_path_factory, steps):
    world = World(tmp_path_factory.mktemp("world"), 2)
    try:
        check_steps(world, steps)
    finally:
        world.close()


WOKEN = SharedLeader.pause


def pause_with_the_trainers_lease(self, lost, deadline):
    with mock.patch.object(LeaseFolder, "write"):
        return WOKEN(self, lost, deadline)


async def release_at_once(self, server):
    await server.release_memory(sorted(ALL))


MUTANTS = {
    "a server left out of a push is told to continue": {"_resume_meanwhile": ServerLeader._resume_meanwhile},
    "one that does not fall asleep is left alive": {"kill": lambda self, why: None},
    "one that runs is told to release": {"_fall_asleep": release_at_once},
    "servers wake while the trainer has the GPUs": {"pause": pause_with_the_trainers_lease},
}
EVENTFUL: list[Step] = [
    ([], [(1, "resume_memory", False)], []),
    ([(0, "release_memory", False)], [], []),
    ([], [], [1]),
    ([], [], []),
]


@pytest.mark.parametrize("changes", [{}, *MUTANTS.values()], ids=["as it is", *MUTANTS])
def test_a_leader_that_breaks_a_rule_is_caught(world, monkeypatch, changes):
    for name, change in changes.items():
        monkeypatch.setattr(SharedLeader, name, change)
    caught = pytest.raises(AssertionError) if changes else nullcontext()
    with caught:
        check_steps(world, EVENTFUL)


def test_calls_of_the_stand_in_are_deadly_in_the_wrong_order(tmp_path):
    lease = LeaseFolder(tmp_path)
    for wrong in ("release_memory", "resume_memory"):
        server = Server("http://s:1", lease)
        with pytest.raises(ConnectionError):
            asyncio.run(getattr(server, wrong)([WEIGHTS]))
        assert server.is_dead and server.deaths
