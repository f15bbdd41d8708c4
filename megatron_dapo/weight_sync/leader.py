"""Rank 0's work with the servers in a push: pause them, verify them, resume them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megatron_dapo.config.schema.run import PauseMode
from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.weight_sync.servers import (
    BACKGROUND_S,
    Call,
    ServerCalls,
    ServerControl,
    ServerMember,
    culprits,
    pause,
    resume,
)
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

log = logging.getLogger(__name__)

CLEANUP_SHARE = 0.4
"""Of the reserve (see `push.RESERVE_S`): for letting the surviving servers go on after a
failure."""

LAST_SHARE = 0.2
"""Of the reserve: the least time for servers to close their sessions, to be compared and to resume,
after sending took all the time. Three of these, or one and the probe, end at the start of
CLEANUP_SHARE."""

ENTER_S = 20.0
"""Seconds for a server to pause and open a session, else a push leaves it out. At most a quarter of
the deadline."""

MIN_REPEAT_S = 1.0
"""A push that has less time left is not repeated."""


class ServerLeader:
    """The servers as rank 0 leads them; other ranks have an unused one.

    Args:
        urls: returns the URLs of the current servers.
        reserve_s: the end of the deadline, kept for failures.
        report_unresponsive: called with the servers left out (URL -> why). They may be stuck for
            long, over NCCL as members of a dead server's group.
        pause_mode: as in the config.
        in_blocks: whether FP8 blocks are pushed.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        calls: ServerCalls,
        timeout_s: float,
        reserve_s: float,
        report_unresponsive: Callable[[dict[str, str]], None],
        pause_mode: PauseMode,
        in_blocks: bool = False,
    ) -> None:
        self._urls = urls
        self._calls = calls
        self._enter_s = min(ENTER_S, timeout_s / 4)
        self._reserve_s = reserve_s
        self._report_unresponsive = report_unresponsive
        self._pause_mode = pause_mode
        self._in_blocks = in_blocks
        self._members: dict[str, ServerMember] = {}  # of this push
        # servers that confirmed a push, with their version then
        self._known: dict[str, ServerMember] = {}
        self._resuming: dict[str, Call] = {}  # servers to resume in the background

    def pause(self, lost: Sequence[str], deadline: Deadline) -> dict[str, ServerMember]:
        """Pause the current servers, except those lost in this push, and open a session on each;
        return the ready ones by URL."""
        urls = [url for url in self._urls() if url not in lost]
        for url in urls:
            call = self._resuming.pop(url, None)
            if call is not None:
                call.answer.cancel()  # it would close the new session
        enter = partial(pause, mode=self._pause_mode, known=self._known, in_blocks=self._in_blocks)
        members, failures = self._calls.ask(urls, enter, min(self._enter_s, deadline.left()))
        self.leave_out("pause", failures)  # one may have paused
        self._members = {url: members[url] for url in urls if url in members}
        return self._members

    def recover(self, urls: Sequence[str], failure: str, deadline: Deadline) -> tuple[list[str], bool]:
        """Close the sessions after a failed attempt with these servers; return the lost ones, and
        whether time is left for another attempt.

        The others stay paused: they have some of the weights, and tokens written before the next
        attempt would make whole answers useless. A restarted server has no session, so the call
        fails, as it does for a dead server.

        Raises:
            WeightSyncError: if no lost server explains the failure, or if no time is left for the
                remaining ones.
        """
        limit_s = min(CLEANUP_SHARE * self._reserve_s, self._at_least(deadline.left()))
        _, failures = self._calls.ask(urls, lambda server: server.end_weight_update(), limit_s)
        self._resume_meanwhile(failures)
        may_repeat = deadline.left() > MIN_REPEAT_S
        if not failures or (not may_repeat and len(failures) < len(urls)):
            raise WeightSyncError(failure)
        then = "the push is repeated" if may_repeat else "the push is over, without a server"
        log.warning("weight sync: left out %s; %s. %s", ", ".join(failures), then, failure)
        return list(failures), may_repeat

    def commit(self, version: int, urls: Sequence[str], deadline: Deadline) -> list[str]:
        """Close the sessions and read the version back; return the servers that answer. The others
        have the version too, and are told to resume."""

        async def close_session(server: ServerControl) -> str:
            await server.end_weight_update()
            return str(await server.weight_version())

        versions, failures = self._calls.ask(urls, close_session, self._at_least(deadline.left() / 2))
        self.leave_out("commit", failures)
        wrong = [f"server {url} reports version {held}" for url, held in versions.items() if held != str(version)]
        if wrong:
            raise WeightSyncError(f"read back: pushed version {version}, but {'; '.join(wrong)}")
        self._known |= {url: replace(self._members[url], version=held) for url, held in versions.items()}
        return list(versions)

    def checksums(self, urls: Sequence[str], deadline: Deadline) -> dict[str, Sequence[dict[str, str]]]:
        """Return, by URL, the checksums of every parameter on each of a server's tensor-parallel
        ranks."""
        limit_s = self._at_least(deadline.left() / 2)
        sums, failures = self._calls.ask(urls, lambda server: server.checksums(), limit_s)
        _warn("verify", failures)
        return sums

    def resume(self, urls: Sequence[str], deadline: Deadline) -> None:
        """Let the servers generate again."""
        _, failures = self._calls.ask(urls, lambda server: server.continue_(), self._at_least(deadline.left()))
        self.leave_out("resume", failures)

    def give_up(self) -> None:
        """Resume the current servers after a failed push; unreachable ones stay as they are."""
        _, failures = self._calls.ask(self._urls(), resume, CLEANUP_SHARE * self._reserve_s)
        self._report_unresponsive(failures)

    def leave_out(self, phase: str, failures: dict[str, str]) -> None:
        """Name these servers (URL -> why) in the log, and go on without them."""
        _warn(phase, failures)
        self._resume_meanwhile(failures)

    def _resume_meanwhile(self, failures: dict[str, str]) -> None:
        """Report these servers as unresponsive and have them resume; return at once. The next push
        cancels unfinished calls."""
        self._report_unresponsive(failures)
        self._resuming |= {call.url: call for call in self._calls.start(failures, resume, BACKGROUND_S)}

    def _at_least(self, limit_s: float) -> float:
        """Return a time limit that a server can meet: the reserve adds to a short one."""
        return max(limit_s, LAST_SHARE * self._reserve_s)


def _warn(phase: str, failures: dict[str, str]) -> None:
    if failures:
        log.warning("weight sync: %s: left out %s", phase, culprits(failures))
