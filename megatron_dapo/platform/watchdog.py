"""Ends a hung job: names the missing rank, and leaves the stacks of all ranks.

Each rank notes its position (`phase`, `beat`: a mere assignment). Two threads do the rest. One
exchanges positions with the other ranks, through a store on rank 0. The other checks by its own
clock, so that a store that does not answer stops nothing. A rank raises the alarm if it makes no
progress within the limit of its phase, or does not hear from another rank. Then every rank writes
its stacks, if it can, and the process ends: a thread in a collective cannot be interrupted. Nothing
may prevent that end, since a hanging file system is one possible cause.
"""

import faulthandler
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megatron_dapo.common import ends
from megatron_dapo.common.addresses import node_name
from megatron_dapo.common.ends import EndKind
from megatron_dapo.common.exit_codes import HANG_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.platform import stores
from megatron_dapo.platform.agreement import Agreement

PUBLISH_INTERVAL_S = 1.0
_CHECK_INTERVAL_S = 0.25
_ANSWERS_S = 6.0  # for every rank to notice an alarm
_WRITING_S = 20.0  # for the stacks, from the alarm on
_CLOSING_S = 4.0  # after that, for every rank to report its end
_RECORD_S = 2.0  # then for the record of this process's end
_LAST_RESORT_S = 60.0  # the process ends by then in any case
_STORE_TIMEOUT_S = 60.0
# limit of a step of the checking thread's clock: a longer time in which the whole process was
# stopped counts for no more
_LONGEST_STEP_S = 2.0
_SHOWN_RANKS = 8
_COLLECTIVES = (
    os.path.join("torch", "distributed"),
    os.path.join("megatron", "core", "distributed"),
    os.path.join("megatron", "core", "pipeline_parallel"),
    os.path.join("megatron", "core", "tensor_parallel"),
    os.path.join("megatron_dapo", "kernels", "pending.py"),
    os.path.join("megatron_dapo", "platform", "parallel.py"),  # waits for its own sends
)
_REPOSITORY = str(Path(__file__).resolve().parents[2]) + os.sep
_STARTED_IN = f"{Path.cwd()}/"  # holds code of the user's own


class _Position:
    """Position of this process's main thread. entered: phases begun and left so far; beats: steps
    within the current one."""

    step = 0
    phase = ""
    entered = 0
    beats = 0

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.beats = 0
        self.entered += 1


_position = _Position()


def beat() -> None:
    """Say that something was done: the limit of the phase counts from here."""
    _position.beats += 1


def begin_step(step: int) -> None:
    """Assign everything from here on to this rollout step."""
    _position.step = step
    ends.begin_step(step)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say that everything inside belongs to this phase; in the same order on all ranks."""
    outer = _position.phase
    _position.enter(name)
    try:
        yield
    finally:
        _position.enter(outer)


@dataclass(frozen=True)
class RankStatus:
    """The position of a rank."""

    node: str
    pid: int
    step: int
    phase: str
    entered: int
    beats: int
    at: str = ""
    """The current line of this program."""
    waits: bool = False
    """Whether it is inside a collective, waiting for others."""
    has_left: bool = False

    def __str__(self) -> str:
        where = f"in `{self.phase}` of step {self.step}" if self.phase else f"in no phase, after step {self.step}"
        return f"{where}{f' at {self.at}' if self.at else ''}"


def missing(places: Mapping[int, RankStatus], silent: set[int]) -> list[int]:
    """Return the ranks for which the others wait: the ranks that do not answer, if any.

    Else they are in the earliest phase, outside a collective if any such rank is, and have the
    fewest beats there. Nobody if all are alike.

    Args:
        places: of the ranks that answer.
    """
    if silent or not places:
        return sorted(silent)
    first = min(place.entered for place in places.values())
    behind = [rank for rank, place in places.items() if place.entered == first]
    working = [rank for rank in behind if not places[rank].waits]
    candidates = working or behind
    beats = min(places[rank].beats for rank in candidates)
    slowest = sorted(rank for rank in candidates if places[rank].beats == beats)
    return slowest if len(slowest) < len(places) or len(places) == 1 else []


def sentence(
    why: str, places: Mapping[int, RankStatus], last: Mapping[int, RankStatus], silent: set[int], folder: Path
) -> str:
    """Return the message for the user, on one line. last: each rank's last known position."""
    descriptions = []
    for rank in missing(places, silent):
        place = places.get(rank) or last[rank]
        state = "has left, last " if place.has_left else "does not answer, last " if rank in silent else "is "
        descriptions.append(f"rank {rank} (process {place.pid} on {place.node}) {state}{place}")
    culprits = f"missing: {_some(descriptions)}"
    if not descriptions:
        everybody = [f"rank {rank} is {place}" for rank, place in sorted(places.items())]
        culprits = f"no rank stands out: {_some(everybody)}"
    return f"Hang: {why}; {culprits}. Stacks of the ranks that answer: {folder}"


def _some(texts: list[str]) -> str:
    more = f"; and {len(texts) - _SHOWN_RANKS} more" if len(texts) > _SHOWN_RANKS else ""
    return "; ".join(texts[:_SHOWN_RANKS]) + more


class _Clock:
    """Seconds since a value changed; a stop of the process counts at most _LONGEST_STEP_S."""

    def __init__(self) -> None:
        self._now = 0.0
        self._last = time.monotonic()
        self._seen: dict[str, tuple[object, float]] = {}

    def tick(self) -> None:
        now = time.monotonic()
        self._now += min(now - self._last, _LONGEST_STEP_S)
        self._last = now

    def age(self, name: str, value: object) -> float:
        seen = self._seen.get(name)
        if seen is None or seen[0] != value:
            self._seen[name] = seen = (value, self._now)
        return self._now - seen[1]


class Watchdog:
    """Watches a rank while a job runs; enter it for that time.

    Args:
        folder: made when there is something to write.
        limits_s: seconds without progress, by phase.
        default_s: of any other phase.
        silence_s: seconds without a message from another rank.
    """

    on_alarm: Callable[[], None] = staticmethod(lambda: None)
    """Called once, before the end."""

    def __init__(
        self,
        agreement: Agreement,
        folder: Path,
        limits_s: Mapping[str, float],
        default_s: float,
        silence_s: float,
    ) -> None:
        """Connect to the other ranks and exchange positions. Collective over all ranks."""
        self._rank = agreement.rank
        self._world = agreement.size
        self._folder = folder
        self._limits = limits_s
        self._default_s = default_s
        self._silence_s = silence_s
        self._node = node_name()
        self._main_thread = threading.main_thread().ident or 0  # there is one while it runs
        self._closing = threading.Event()
        # rank -> (number of its messages, last position)
        self._heard: dict[int, tuple[int, RankStatus]] = {}
        self._alarm, self._num_exchanges, self._num_published = "", 0, 0
        # everybody waits for rank 0 and through its store; rank 0 looks after all
        self._watched = [rank for rank in (range(self._world) if self._rank == 0 else [0]) if rank != self._rank]
        host = stores.meeting_address()
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        leader_store = stores.host_store(host, 0, timeout) if self._rank == 0 else None
        port, token = agreement.gather((leader_store.port, secrets.token_bytes(32)) if leader_store else None)[0]
        store = leader_store or stores.join_store(host, port, timeout)
        self._store = stores.SignedStore(store, token)
        # ignored: a method of every store, missing from torch's stubs
        client = store.clone()  # type: ignore[attr-defined]
        self._own_store = stores.SignedStore(client, token)  # a client answers one thread at a time
        if self._rank == 0:
            self._store.set("alarm", "")
        self._publish()
        # now every key is there
        places = agreement.gather(self._place())
        self._heard = {rank: (0, place) for rank, place in enumerate(places)}
        faulthandler.enable()
        self._threads = [
            threading.Thread(target=work, name=f"watchdog-{work.__name__}", daemon=True)
            for work in (self._talk, self._check)
        ]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the threads and tell the others that this rank leaves."""
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * PUBLISH_INTERVAL_S)

    # ------------------------------------------------------------------------ the thread that talks

    def _talk(self) -> None:
        keys = ["alarm", *(f"place/{rank}" for rank in self._watched)]
        while not self._closing.wait(PUBLISH_INTERVAL_S):
            try:
                self._publish()
                alarm, *places = self._store.get(*keys)
            except dist.DistError:
                continue  # the other thread notices the silence
            for rank, text in zip(self._watched, places, strict=True):
                if text is not None:
                    number, fields = json.loads(text)
                    self._heard[rank] = number, RankStatus(**fields)
            self._alarm = alarm or ""
            self._num_exchanges += 1
        try:
            self._publish(has_left=True)
        except dist.DistError:
            return  # rank 0 has left before

    def _publish(self, has_left: bool = False) -> None:
        self._num_published += 1
        self._store.set(
            f"place/{self._rank}", json.dumps([self._num_published, asdict(self._place(has_left=has_left))])
        )

    def _place(self, at: str = "", waits: bool = False, has_left: bool = False) -> RankStatus:
        return RankStatus(
            self._node,
            os.getpid(),
            _position.step,
            _position.phase,
            _position.entered,
            _position.beats,
            at,
            waits,
            has_left,
        )

    # ----------------------------------------------------------------------- the thread that checks

    def _check(self) -> None:
        clock = _Clock()
        while not self._closing.wait(_CHECK_INTERVAL_S):
            clock.tick()
            if self._alarm:
                self._end(self._alarm)
            if why := self._verdict(clock):
                self._end(why)

    def _verdict(self, clock: _Clock) -> str | None:
        limit = self._limits.get(_position.phase, self._default_s)
        if clock.age("progress", (_position.entered, _position.beats)) > limit:
            return f"rank {self._rank} made no progress for {limit:g} s {self._place()}"
        if self._rank != 0 and clock.age("store", self._num_exchanges) > self._silence_s:
            return f"rank {self._rank} could not reach rank 0 for {self._silence_s:g} s"
        for rank in self._watched:
            number, place = self._heard[rank]
            if clock.age(f"rank {rank}", number) > self._silence_s and not place.has_left:
                return f"rank {rank} was not heard of for {self._silence_s:g} s"
        return None

    def _end(self, why: str) -> None:
        """End the process, even if the log cannot take the last line. Never returns."""
        try:
            _in_thread(_end_after, _LAST_RESORT_S)
            self._last_words(why)
        finally:
            os._exit(HANG_EXIT_CODE)

    def _last_words(self, why: str) -> None:
        """Tell the others, write the stacks, name the missing rank. Calls that may never return run
        in separate threads."""
        began = time.monotonic()
        frame = sys._current_frames().get(self._main_thread)
        own_status = self._place(at=_line_of(frame), waits=_is_waiting(frame))
        places = {self._rank: own_status}
        last = {rank: place for rank, (_, place) in self._heard.items()}
        # as long as the store does not answer, rank 0 is the one who does not
        silent = {0} if self._rank else set(range(1, self._world))
        asking = _in_thread(self._ask, why, own_status, places, last, silent)
        writing = [_in_thread(self.on_alarm), _in_thread(self._write_stacks)]
        asking.join(_ANSWERS_S + 1.0)
        for thread in writing:
            thread.join(max(0.0, began + _WRITING_S - time.monotonic()))
        if any(thread.is_alive() for thread in writing):
            print(f"{self._folder} took no stacks within {_WRITING_S:g} s.", file=sys.stderr)
        text = sentence(why, dict(places), dict(last), set(silent), self._folder)
        print(text, file=sys.stderr, flush=True)
        # the storage may be the cause of the hang
        _in_thread(ends.record_end, EndKind.HANG, HANG_EXIT_CODE, text).join(_RECORD_S)
        if not asking.is_alive():
            until = began + _WRITING_S + _CLOSING_S * (2 if self._rank == 0 else 1)
            _in_thread(self._part, set(places) - {self._rank}, until).join(max(0.0, until + 1.0 - time.monotonic()))

    def _ask(
        self,
        why: str,
        own_status: RankStatus,
        places: dict[int, RankStatus],
        last: dict[int, RankStatus],
        silent: set[int],
    ) -> None:
        """Tell the others of the alarm, and fill in their answers. Never returns if the store does
        not answer."""
        store = self._own_store
        others = sorted(set(range(self._world)) - {self._rank})
        try:
            store.set_first("alarm", why)
            silent.clear()
            silent.update(others)
            store.set(f"stopped/{self._rank}", json.dumps(asdict(own_status)))
            for rank, text in zip(others, store.get(*(f"place/{rank}" for rank in others)), strict=True):
                if text is not None:
                    last[rank] = RankStatus(**json.loads(text)[1])
            deadline = time.monotonic() + _ANSWERS_S
            while silent and time.monotonic() < deadline:
                for rank in [rank for rank in silent if store.store.check([f"stopped/{rank}"])]:
                    [text] = store.get(f"stopped/{rank}")
                    if text is not None:
                        places[rank] = RankStatus(**json.loads(text))
                        silent.discard(rank)
                time.sleep(_CHECK_INTERVAL_S)
        except dist.DistError:  # rank 0 has ended meanwhile
            return

    def _part(self, others: set[int], until: float) -> None:
        """Wait until the other ranks that answered are done too, or until the time `until`.

        The end of the first process may make a launcher kill the others. Rank 0, which holds the
        store, goes last.
        """
        try:
            for word in ("done", "left"):
                self._own_store.set(f"{word}/{self._rank}", "1")
                if word == "left" and self._rank != 0:
                    return
                keys = [f"{word}/{rank}" for rank in others]
                while time.monotonic() < until and not self._own_store.store.check(keys):
                    time.sleep(_CHECK_INTERVAL_S)
        except dist.DistError:  # rank 0 has ended meanwhile
            return

    def _write_stacks(self) -> None:
        try:
            # in memory first: faulthandler lets no other thread run while it writes
            with open(os.memfd_create("stacks"), "w+b") as stacks:
                faulthandler.dump_traceback(stacks, all_threads=True)
                stacks.seek(0)
                text = stacks.read()
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank-{self._rank}.txt").write_bytes(text)
            for recorder, trace in _flight_records():
                write_whole(self._folder / f"flight-{recorder}-rank-{self._rank}.json", trace)
        except (OSError, RuntimeError) as error:
            # a full disk, or torch, must not keep the job alive
            print(f"The stacks cannot be written to {self._folder}: {error}", file=sys.stderr, flush=True)


def _in_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(HANG_EXIT_CODE)


def _flight_records() -> Iterator[tuple[str, bytes]]:
    """Yield torch's records of the last collectives as JSON, each after its recorder's name (nccl
    or gloo).

    Some builds of torch keep none. Without a GPU, NCCL's is left out: builds for GPUs keep an empty
    one.
    """
    bindings = torch._C._distributed_c10d  # no public name leads there
    for recorder, name in (("nccl", "_dump_nccl_trace_json"), ("gloo", "_dump_fr_trace_json")):
        # no call to the driver: it may be the cause
        used = recorder != "nccl" or torch.cuda.is_initialized()
        if used and (dump := getattr(bindings, name, None)):
            trace = dump()
            yield recorder, trace if isinstance(trace, bytes) else trace.encode()


def _is_waiting(frame: FrameType | None) -> bool:
    """Return whether a thread's innermost Python code is for collectives: then it waits for other
    ranks."""
    return frame is not None and any(folder in frame.f_code.co_filename for folder in _COLLECTIVES)


def _line_of(frame: FrameType | None) -> str:
    """Return the innermost line of this program, or of code beside the run, in a thread's stack,
    e.g. `megatron_dapo/training/policy.py:88`, or ""."""
    while frame is not None:
        name = frame.f_code.co_filename
        own = name.removeprefix(_REPOSITORY).removeprefix(_STARTED_IN)
        if own.startswith("megatron_dapo/") or (own != name and "/lib/python3" not in name):
            return f"{own}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
