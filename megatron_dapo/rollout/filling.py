"""Fills the queue: draws prompts as far as admission lets it and samples their groups, also while nobody waits."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from megatron_dapo.common.rollout_errors import Aborted, NeedsSync
from megatron_dapo.data.samples import Group, PartialResponse, Sample
from megatron_dapo.rollout.drawing import Drawing
from megatron_dapo.rollout.time_spent import TimeSpent
from megatron_dapo.servers.server import ServerState
from megatron_dapo.servers.server_pool import ServerPool

log = logging.getLogger(__name__)

_ABORT_S = 5.0  # that servers may take to answer with what they have, and these answers to be judged


class Filling:
    """The sampling of the groups that a `GroupQueue` draws, one task per group.

    With `max_staleness` above 0 it goes on after `fill` has returned: a prompt is drawn whenever a slot is free that no
    request waits for, and `GroupQueue.may_start` allows it. With 0 prompts are drawn in waves (`GroupQueue.next_wave`),
    and only inside `fill`: between two steps nothing is under way.
    """

    def __init__(
        self,
        drawing: Drawing,
        servers: ServerPool,
        sample_group: Callable[[Group, Callable[[Sample], None], Callable[[PartialResponse], None]], Awaitable[Group]],
        num_responses: int,
        has_baseline: bool = False,
    ) -> None:
        """Prepare it; nothing is drawn before `fill`.

        Args:
            drawing: the prompts and the queue; what its `decide` raises ends the filling.
            servers: their slots, and the weight version that they hold.
            sample_group: samples what the group lacks; it hands on each new sample as soon as that is finished, and
                what there is of a response that is aborted.
            num_responses: per group. has_baseline: a group needs one more, which is no sample of it.
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
        self._asked_for: set[str] = set()  # servers that came back in this step, for which a push was asked
        self._needs_sync: NeedsSync | None = None
        self._failure: Exception | None = None
        self._groups_or_slots_changed = asyncio.Event()
        self._held = TimeSpent()
        self._is_waited_for = False  # by `fill`

    async def fill(self) -> None:
        """Wait until the queue's step is ready, and draw what it needs.

        Raises NeedsSync where servers lack the weights: what is under way goes on, and so does the next call. Raises
        the first failure since the last call, also one of the time in between; then nothing is under way any more.
        """
        self._needs_sync = None
        await self.raise_failure()
        if self._goes_on and self._watch is None:
            self._watch = asyncio.create_task(self._watch_slots())
        self._is_waited_for = True
        try:
            self._drawing.decide(self._is_waited_for)  # on what a saved state had finished
            self._go_on()  # newer weights let it draw more, also where the step is ready
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
                self._failure = error  # the queue may have been put back: it takes in nothing of what is under way
            await self.raise_failure()
        finally:
            self._is_waited_for = False
        self._asked_for.clear()

    async def raise_failure(self) -> None:
        """Raise what ended the filling, if anything did."""
        failure = self._failure
        if failure is not None:
            await self.cancel()
            self._failure = None
            raise failure

    async def halt(self) -> Exception | None:
        """End what is under way; the queue keeps the samples that are finished, and what there is of others. The next
        `fill` goes on, or raises the failure that is returned."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # so that nothing is started any more
        if self._tasks:
            await self._abort_requests()
        await self.cancel()
        return self._failure

    async def cancel(self) -> None:
        """End what is under way at once; the queue keeps the samples that are finished."""
        tasks = [*self._tasks.values(), *filter(None, [self._watch])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watch = None
        self._held.turn(False)

    async def _abort_requests(self) -> None:
        """Wait, not for ever, until the groups have taken in what there is of their responses."""
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
        """Return the seconds since the last call in which a slot was free and only the bound on the age kept it so."""
        return self._held.take()

    def _check_servers(self) -> None:
        """Raise NeedsSync where no server has the weights, or where some came back without them: once per server and
        step, so that none holds up the others again and again.

        Where nothing goes on between steps, the requests that are under way are waited for.
        """
        if self._tasks and not self._goes_on:
            return
        if self._needs_sync is not None:
            raise self._needs_sync
        if stale := set(self._servers.urls(ServerState.STALE)) - self._asked_for:
            self._asked_for |= stale
            raise NeedsSync(f"not at work with weight version {self._servers.version}: {', '.join(sorted(stale))}")

    def _start_groups(self) -> None:
        """Start what may be sampled now: open groups first, which a saved state or a lost server left, then draws."""
        if self._failure is not None or self._needs_sync is not None:
            return
        version = self._servers.version
        assert version is not None, "expect() comes first"
        if len(self._tasks) < self._queue.num_unfinished:
            for position, group in enumerate(self._queue.open_groups):
                is_idle = group.uid not in self._tasks and not self._queue.is_finished(group.uid)
                if is_idle and (not self._goes_on or self._queue.may_start(position, version)):
                    self._start(self._queue.renew(group.uid, version))
        if self._goes_on:
            self._draw_paced(version)
        else:
            for _ in range(self._queue.next_wave()):
                self._draw(version)

    def _draw_paced(self, version: int) -> None:
        is_allowed = self._queue.may_start(self._queue.num_open, version)
        while is_allowed and self._servers.num_free_slots > self._num_arriving:
            self._draw(version)
            is_allowed = self._queue.may_start(self._queue.num_open, version)
        self._held.turn(not is_allowed and self._servers.num_free_slots > self._num_arriving)

    def _draw(self, version: int) -> None:
        prompt, replayed = self._drawing.next_prompt()
        self._start(self._queue.draw(prompt, version, replayed))

    def _start(self, group: Group) -> None:
        task = asyncio.create_task(self._run(group))
        self._tasks[group.uid] = task
        task.add_done_callback(partial(self._note_end, group.uid))  # also of one that is cancelled before it begins
        num_requests = self._num_requests - len(group.samples)
        self._num_arriving += num_requests
        # In its next turn the loop begins the task, in the turn after it those of the requests, which take slots. A
        # turn takes long where many begin at once.
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
        """Sample a group, and have the queue take it in. Where no server can it stays open, as far as it got."""
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
        """Start what may be started now, where that does not wait for `fill`."""
        if self._watch is None:
            return
        try:
            self._start_groups()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End what is under way; `fill` raises the first error."""
        if self._failure is None:
            log.error("sampling ends: %s", error)
            self._failure = error
        for task in (*self._tasks.values(), *filter(None, [self._watch])):
            if task is not asyncio.current_task():
                task.cancel()
        self._groups_or_slots_changed.set()
