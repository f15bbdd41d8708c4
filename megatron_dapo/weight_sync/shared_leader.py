"""Rank 0's work with servers on the trainer's GPUs: have them sleep, wake, or be killed."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.weight_sync.leader import ServerLeader
from megatron_dapo.weight_sync.servers import (
    PROBE_S,
    ServerCalls,
    ServerControl,
    ServerMember,
    culprits,
    open_session,
)
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

log = logging.getLogger(__name__)

WEIGHTS = "weights"
REST = ("kv_cache", "cuda_graph")
"""SGLang's tags of a server's memory. The rest comes back only after the trainer's weights are
gone."""

KILL_S = 60.0
"""Seconds for a supervisor to kill a server and say so, on top of a deadline."""

_POLL_S = 0.1


class SharedLeader(ServerLeader):
    """The servers of shared GPUs as rank 0 leads them; other ranks have an unused one.

    A server left out of a push is killed: awake it would hold memory, and told to continue without
    its memory it would die of the next request. Its supervisor starts it again when servers have
    the GPUs.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        calls: ServerCalls,
        timeout_s: float,
        reserve_s: float,
        report_unresponsive: Callable[[dict[str, str]], None],
        lease: LeaseFolder,
    ) -> None:
        super().__init__(urls, calls, timeout_s, reserve_s, report_unresponsive, "retract")
        self._lease = lease
        self._released: dict[str, set[str]] = {}  # URL -> tags of the living servers
        self._told: set[str] = set()  # URLs told to release memory, in this sleep
        # since the servers had the GPUs, URL -> why: to be killed, and killed
        self._failed: dict[str, str] = {}
        self._killed: dict[str, str] = {}

    def sleep(self, deadline: Deadline) -> None:
        """Have all servers release their memory; kill those that do not.

        A starting server gets half of the deadline to come up: else one that starts more slowly than
        the others sample would never come back. Raises WeightSyncError naming servers that neither
        sleep nor end.
        """
        turn = self._lease.write(Holder.MOVING).turn
        urls = [url for url in self._urls() if url not in self._failed | self._killed]
        patience = Deadline(deadline.left() / 2)
        self._told.clear()
        failures = self._have_sleep(urls, patience)
        while (late := self._late(failures, turn)) and patience.left():
            time.sleep(_POLL_S)
            failures = {url: why for url, why in failures.items() if url not in late} | self._have_sleep(late, patience)
        self.kill(self._failed | failures)

    def _late(self, failures: Collection[str], turn: int) -> list[str]:
        """Return the servers that may still come up: alive, and not told to release anything yet.

        A second release of the same memory would end a server.
        """
        gone = self._lease.gone(turn)
        return [url for url in failures if url not in gone and url not in self._told]

    def _have_sleep(self, urls: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """Return URL -> why of the servers that do not sleep."""
        asleep, failures = self._calls.ask(urls, self._fall_asleep, deadline.left())
        self._released |= {url: {WEIGHTS, *REST} for url in asleep}
        return failures

    def kill(self, why: Mapping[str, str]) -> None:
        """Have these servers (URL -> why) killed, and wait until their processes are gone.

        Dead servers hold no memory. Raises WeightSyncError naming those that still answer. A silent
        one may have died with its supervisor: then the GPUs' free memory decides.
        """
        missing = self._have_killed(why, Deadline(KILL_S))
        alive, silent = self._calls.ask(missing, lambda server: server.weight_version(), PROBE_S)
        if alive:
            named = culprits({url: why[url] for url in alive})
            raise WeightSyncError(f"servers neither sleep nor end within {KILL_S:g} s: {named}")
        if silent:
            log.warning("weight sync: nobody says that they ended: %s", culprits(silent))

    def _have_killed(self, why: Mapping[str, str], deadline: Deadline) -> list[str]:
        """Return the servers of these (URL -> why) not seen to end."""
        if not why:
            return []
        log.warning("weight sync: killed: %s", culprits(why))
        lease = self._lease.write(Holder.MOVING, list(why))
        while (missing := set(why) - self._lease.gone(lease.turn)) and deadline.left():
            time.sleep(_POLL_S)
        for url in why:
            self._released.pop(url, None)
            self._failed.pop(url, None)
        self._killed |= why
        return sorted(missing)

    def give_to_trainer(self) -> None:
        """Note that the trainer may take the memory."""
        self._lease.write(Holder.TRAINER)

    def pause(self, lost: Sequence[str], deadline: Deadline) -> dict[str, ServerMember]:
        """Give the sleeping servers memory for weights and open a session on each; return the ready
        ones by URL. They stay paused."""
        self._lease.write(Holder.MOVING)
        urls = [url for url, tags in self._released.items() if WEIGHTS in tags and url not in lost]
        for url in urls:
            self._released[url].discard(WEIGHTS)  # a failed call may have taken the memory
        members, failures = self._calls.ask(urls, partial(_wake, known=self._known), deadline.left() / 2)
        self.leave_out("wake", failures)
        self._members = {url: members[url] for url in urls if url in members}
        return self._members

    def resume(self, urls: Sequence[str], deadline: Deadline) -> None:
        """Give the servers back all memory, and let them generate again; the others are killed."""
        _, failures = self._calls.ask(urls, _resume_all, self._at_least(deadline.left()))
        self.leave_out("resume", failures)
        # now: a supervisor that misses this turn of the lease would leave them half awake
        condemned = self._have_killed(dict(self._failed), Deadline(deadline.left() / 2))
        for record in (self._released, self._failed, self._killed):
            record.clear()
        self._lease.write(Holder.SERVERS, condemned)

    def give_up(self) -> None:
        """Leave the servers as they are: the run ends, and they with it."""

    async def _fall_asleep(self, server: ServerControl) -> None:
        tags = {WEIGHTS, *REST} - self._released.get(server.url, set())
        if not tags:
            return
        await server.pause("retract")  # a running server dies of the release
        self._told.add(server.url)
        await server.release_memory(sorted(tags))

    def _resume_meanwhile(self, failures: dict[str, str]) -> None:
        self._failed |= failures
        for url in failures:
            self._released.pop(url, None)


async def _wake(server: ServerControl, known: Mapping[str, ServerMember]) -> ServerMember:
    await server.resume_memory([WEIGHTS])
    version = str(await server.weight_version())
    member = known.get(server.url)
    if member is None:
        member = ServerMember(version, int((await server.server_info()).get("tp_size", 1)))
    await open_session(server)
    return replace(member, version=version)


async def _resume_all(server: ServerControl) -> None:
    await server.resume_memory(REST)
    await server.continue_()
