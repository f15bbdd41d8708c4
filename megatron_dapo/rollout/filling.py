"""Fills the queue: draws prompts as admission allows, and samples their groups.

With `max_staleness` above 0 it goes on while the trainer trains.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial

from megatron_dapo.common.places import Places
from megatron_dapo.common.rollout_errors import Aborted, NeedsSync
from megatron_dapo.data.samples import Group, PartialResponse, Sample
from megatron_dapo.rollout.drawing import Drawing
from megatron_dapo.rollout.time_spent import TimeSpent
from megatron_dapo.servers.server_health import ServerState
from megatron_dapo.servers.server_pool import ServerPool

log = logging.getLogger(__name__)

# for servers to answer with their tokens so far, and for the scoring of these answers
_ABORT_S = 5.0


class Filling:
    """Samples the groups drawn by a `GroupQueue`, one task per group.

    With `max_staleness` above 0 it goes on after `fill` has returned. It draws a prompt whenever
    `GroupQueue.may_start` allows it and there is a free slot without a waiting request; for agents
    also a free place. With 0 prompts are drawn in waves (`GroupQueue.next_wave`), and only inside
    `fill`: nothing is under way between two steps.
    """

    def __init__(
        self,
        drawing: Drawing,
        servers: ServerPool,
        sample_group: Callable[[Group, Callable[[Sample], None], Callable[[PartialResponse], None]], Awaitable[Group]],
        num_responses: int,
        has_baseline: bool = False,
        places: Places | None = None,
    ) -> None:
        """Prepare it; nothing is drawn before `fill`.

        Args:
            drawing: the prompts and the queue; an error of its `decide` ends the filling.
            servers: their slots and their weight version.
            sample_group: completes a group; it hands on each new sample at once, and the unfinished
                rest of aborted responses.
            num_responses: per group.
            has_baseline: a group needs one more response, which is no sample of it.
            places: of responses at work at once, if they hold more than a server's slot.
        """
        self._drawing = drawing
        self._queue = drawing.queue
        self._servers = servers
        self._sample_group = sample_group
        self._num_requests = num_responses + has_baseline
        self._goes_on = self._queue.limits.max_staleness > 0
        self._tasks: dict[str, asyncio.Task] = {}  # uid -> the sampling of an open group
        self._watch: asyncio.Task | None = None
        self._num_arriving = 0  # requests of groups that were started just now
        self._asked_for: set[str] = set()  # servers of this step for which a push was asked
        self._needs_sync: NeedsSync | None = None
        self._failure: Exception | None = None
        self._groups_or_slots_changed = asyncio.Event()
        self._held = TimeSpent()
        self._is_waited_for = False  # by `fill`
        servers.is_blocked = self._is_blocked
        self._places = places or Places(sys.maxsize)
        self._places.on_free = self._note_free_place

    async def fill(self) -> None:
        """Wait until the queue's step is ready, and draw its prompts.

        Raises NeedsSync if servers lack the weights: sampling goes on, and so does the next call.
        Raises the first failure since the last call, also of the time in between; then nothing is
        under way.
        """
        self._needs_sync = None
        await self.raise_failure()
        if self._goes_on and self._watch is None:
            self._watch = asyncio.create_task(self._watch_slots())
        self._is_waited_for = True
        try:
            self._drawing.decide(self._is_waited_for)  # on finished groups of a saved state
            self._go_on()  # newer weights let it draw more, also if the step is ready
            while not self._queue.is_ready():
                await self.raise_failure()
                self._check_servers()
                self._start_groups()
                await self._groups_or_slots_changed.wait()
                self._groups_or_slots_changed.clear()
        except NeedsSync:
            raise
        except asyncio.CancelledError:  # it was asked to stop, or takes too long
            await self.halt()
            raise
        except Exception as error:
            if self._failure is None:
                self._failure = error  # the queue may have been put back: it takes in nothing more
            await self.raise_failure()
        finally:
            self._is_waited_for = False
        self._asked_for.clear()

    async def raise_failure(self) -> None:
        """Raise the error that ended the filling, if any."""
        failure = self._failure
        if failure is not None:
            await self.cancel()
            self._failure = None
            raise failure

    async def halt(self) -> Exception | None:
        """End all sampling; the queue keeps finished samples and the unfinished rest.

        The next `fill` goes on, or raises the returned failure.
        """
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # so that nothing is started any more
        if self._tasks:
            await self._abort_requests()
        await self.cancel()
        return self._failure

    async def cancel(self) -> None:
        """End all sampling at once; the queue keeps finished samples."""
        tasks = [*self._tasks.values(), *filter(None, [self._watch])]
        self._watch = None  # so that no place or slot that becomes free starts anything
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._held.switch(False)

    async def _abort_requests(self) -> None:
        """Wait, for a limited time, until the groups have taken in their unfinished responses."""
        tasks = list(self._tasks.values())
        abort = asyncio.create_task(self._servers.abort_requests(_ABORT_S))
        try:
            await asyncio.wait([abort, *tasks], timeout=_ABORT_S)
        finally:
            abort.cancel()
            self._servers.is_aborting = False
        if num_late := sum(not task.done() for task in tasks):
            log.warning("%d groups are not waited for any more: they do not end within %g s", num_late, _ABORT_S)

    def take_held_s(self) -> float:
        """Return the seconds of slots kept idle only by `max_staleness`, since the last call."""
        return self._held.take()

    def _is_blocked(self) -> bool:
        """Return whether a slot is free, and only `max_staleness` keeps it so."""
        version = self._servers.version
        return self._has_room() and version is not None and self._queue.is_held(version)

    def _has_room(self) -> bool:
        """Return whether a free slot, and a free place, has no request coming to it."""
        return min(self._servers.num_free_slots, self._places.num_free) > self._num_arriving

    def _note_free_place(self) -> None:
        self._groups_or_slots_changed.set()
        self._go_on()

    def _check_servers(self) -> None:
        """Raise NeedsSync if no server has the weights, or if some came back without them.

        Once per server and step, so that no server holds up the others again and again. With
        `max_staleness` 0 it waits for the requests under way first.
        """
        if self._tasks and not self._goes_on:
            return
        if self._needs_sync is not None:
            raise self._needs_sync
        if behind := set(self._servers.urls(ServerState.BEHIND)) - self._asked_for:
            self._asked_for |= behind
            raise NeedsSync(f"not at work with weight version {self._servers.version}: {', '.join(sorted(behind))}")

    def _start_groups(self) -> None:
        """Start the open groups of a saved state or a lost server, then new draws, as allowed."""
        if self._failure is not None or self._needs_sync is not None:
            return
        version = self._servers.version
        assert version is not None, "expect() comes first"
        if len(self._tasks) < self._queue.num_unfinished:
            for position, group in enumerate(self._queue.open_groups):
                if group.uid in self._tasks or self._queue.is_finished(group.uid):
                    continue
                if self._goes_on and not self._queue.may_start(position, version):
                    break  # nor may a later one
                self._start(self._queue.renew(group.uid, version))
        if self._goes_on:
            self._draw_paced(version)
        else:
            for _ in range(self._queue.next_wave()):
                self._draw(version)

    def _draw_paced(self, version: int) -> None:
        is_held = False
        # slots first: the queue looks at all its open draws
        while not is_held and self._has_room():
            is_held = not self._queue.may_start(self._queue.num_open, version)
            if not is_held:
                self._draw(version)
        self._held.switch(is_held)

    def _draw(self, version: int) -> None:
        prompt, replayed = self._drawing.next_prompt()
        self._start(self._queue.draw(prompt, version, replayed))

    def _start(self, group: Group) -> None:
        task = asyncio.create_task(self._run(group))
        self._tasks[group.uid] = task
        # also if it is cancelled before it begins
        task.add_done_callback(partial(self._note_end, group.uid))
        num_requests = self._num_requests - len(group.samples)
        self._num_arriving += num_requests
        # In its next turn the loop begins the task, in the turn after it the tasks of the requests,
        # which take slots. A turn takes long if many begin at once.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._note_arrival, num_requests)

    def _note_end(self, uid: str, task: asyncio.Task) -> None:
        del self._tasks[uid]
        self._groups_or_slots_changed.set()
        if not task.cancelled():
            self._go_on()

    def _note_arrival(self, num_requests: int) -> None:
        self._num_arriving -= num_requests
        self._go_on()

    async def _run(self, group: Group) -> None:
        """Sample a group for the queue.

        Without a server for it, it stays open with its samples so far.
        """
        try:
            finished = await self._sample_group(group, self._add_sample, partial(self._add_partial, group.uid))
            if self._failure is None:
                self._queue.add_finished(finished)
                self._drawing.decide(self._is_waited_for)
        except NeedsSync as reason:
            self._needs_sync = reason
        except Aborted:
            log.info("group %s is not finished: its requests were aborted", group.uid)
        except Exception as error:
            self._fail(error)

    def _add_sample(self, sample: Sample) -> None:
        if self._failure is None:  # which may have put back the queue
            self._queue.add_sample(sample)

    def _add_partial(self, uid: str, response: PartialResponse) -> None:
        if self._failure is None:
            self._queue.add_partial(uid, response)

    async def _watch_slots(self) -> None:
        while True:
            try:
                await self._servers.wait_for_slot_change()
            except Exception as error:
                self._fail(error)
                return
            if self._servers.urls(ServerState.CURRENT):
                self._needs_sync = None
            self._groups_or_slots_changed.set()
            self._go_on()

    def _go_on(self) -> None:
        """Start the groups that need not wait for `fill`."""
        if self._watch is None:
            return
        try:
            self._start_groups()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End all sampling; `fill` raises the first error."""
        if self._failure is None:
            log.error("sampling ends: %s", error)
            self._failure = error
        for task in (*self._tasks.values(), *filter(None, [self._watch])):
            if task is not asyncio.current_task():
                task.cancel()
        self._groups_or_slots_changed.set()
