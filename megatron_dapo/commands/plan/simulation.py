"""A discrete-event simulation of rollout and training: a run's speed, without servers and without
waiting.

Queue and admission are the program's own (`megatron_dapo.queue`). The model is of the time of the
servers, of the trainer and of the push of the weights. Pure: no clock, no files. Seconds are
simulated seconds.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from megatron_dapo.commands.plan.simulated_fleet import SimulatedFleet
from megatron_dapo.commands.plan.simulated_server import Machines, SimulatedRequest, SimulatedServer
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.data.token_arrays import LOG_PROB, TOKEN, nothing, repeated
from megatron_dapo.queue.account import Account
from megatron_dapo.queue.group_filter import by_correctness
from megatron_dapo.queue.group_queue import FilterReason, GroupQueue, QueueLimits


@dataclass(frozen=True)
class Draw:
    """One drawn prompt: the tokens of its n responses, and whether the group carries signal."""

    lengths: tuple[int, ...]
    has_signal: bool


Draws = Callable[[int], Draw]  # number of the draw -> the servers' answers
_ANEW = 1_000_000  # between the numbers of a draw's answers elsewhere


def random_draws(lengths: Lengths, acceptance: float, n: int, seed: int) -> Draws:
    """Return draws that depend only on their number and the seed, so that compared runs get the
    same ones.

    acceptance: share of groups with signal, above 0; n: responses of a group, at least 2 if some
    have none.
    """
    assert acceptance == 1 or (acceptance > 0 and n >= 2), "no group would ever carry signal"

    def draw(number: int) -> Draw:
        source = random.Random(seed * 1_000_003 + number)
        return Draw(tuple(lengths.sample(source) for _ in range(n)), source.random() < acceptance)

    return draw


@dataclass(frozen=True)
class Recipe:
    """The drawing of prompts and the training, by config keys."""

    train_batch_size: int
    gen_batch_size: int
    n: int
    max_staleness: int
    num_steps: int
    """Steps to measure after the first `warm_up` ones; the run is longer, so that none of them is
    the last."""
    warm_up: int = 4


@dataclass(frozen=True)
class Speed:
    """Measurements or predictions over the steps after the warm-up."""

    steps_per_s: float
    wait_share: float
    """Of the time: the trainer's wait for batches."""
    slots_used: float
    """Mean share of the servers' slots with a request in flight."""
    discarded_share: float
    """Discarded groups with signal, of all generated."""


class Simulation:
    """One run: the trainer requests batches, trains and pushes; the servers write between these
    moments.

    `drawn`, `trained`, `continued` and `step_s`: all groups, answers and steps so far, for
    comparisons. filter_reason: as in `GroupQueue`.
    """

    def __init__(
        self, machines: Machines, recipe: Recipe, draws: Draws, filter_reason: FilterReason | None = None
    ) -> None:
        self._machines = machines
        self._recipe = recipe
        self._draws = draws
        limits = QueueLimits(
            recipe.train_batch_size,
            recipe.gen_batch_size,
            max_num_gen_batches=0,
            max_staleness=recipe.max_staleness,
        )
        self.queue = GroupQueue(limits, filter_reason or by_correctness("strict"))
        self._version = 0  # that the servers hold
        self._confirmed = 0  # the controller's knowledge: updated when the next step is requested
        self.fleet = SimulatedFleet(machines, self.length_anew)
        self._numbers = itertools.count()
        self._groups: dict[str, Group] = {}  # uid -> open group, as it was drawn
        self._samples: dict[str, list[Sample]] = {}  # uid -> finished samples of the group
        self._may_draw = True  # False: the queue refused, and has not changed since
        self._now = 0.0
        self._slot_seconds = 0.0
        self.step_s: list[float] = []
        self.drawn: list[Draw] = []
        self.trained: list[Group] = []
        self.continued: list[SimulatedRequest] = []  # whose answers were moved or begun anew

    def run(self) -> Speed:
        """Return the measurements of the steps after the warm-up."""
        recipe = self._recipe
        waited_s = 0.0
        started = (self._now, self._slot_seconds, self.queue.account)
        for step in range(1, recipe.warm_up + recipe.num_steps + 1):
            if step == recipe.warm_up + 1:
                started = (self._now, self._slot_seconds, self.queue.account)
                waited_s = 0.0
            asked_at = self._now
            self.queue.begin(step, weight_version=self._version)
            self._confirmed = self._version
            self._may_draw = True
            self._admit(is_asked=True)
            while not self.queue.is_ready():
                self._to_next_end(math.inf, is_asked=True)
            self.trained += self.queue.take().groups
            self._may_draw = True
            waited_s += self._now - asked_at
            self._train()
            self.step_s.append(self._now - asked_at)
        seconds = self._now - started[0]
        return Speed(
            steps_per_s=recipe.num_steps / seconds,
            wait_share=waited_s / seconds,
            slots_used=(self._slot_seconds - started[1]) / (seconds * self._machines.num_slots),
            discarded_share=_discarded_share(started[2], self.queue.account),
        )

    def _train(self) -> None:
        """Let the servers go on while the trainer works, and stand still while the weights are
        pushed."""
        self._admit(is_asked=False)
        end = self._now + self._machines.train_s
        while self._to_next_end(end, is_asked=False):
            pass
        self._pass(self._machines.push_s)
        for server in self.fleet.servers:
            server.push()
        self._version += 1

    def _to_next_end(self, deadline: float, is_asked: bool) -> bool:
        """Advance to the end of the next request or a change of the servers, and admit allowed
        draws; False if the deadline is earlier."""
        next_server = min(self.fleet.servers, key=SimulatedServer.seconds_to_next_end)
        seconds = next_server.seconds_to_next_end()
        to_event = max(self.fleet.next_event - self._now, 0.0)
        if self._now + min(seconds, to_event) > deadline:
            self._write(deadline - self._now)
            return False
        assert min(seconds, to_event) < math.inf, "the trainer waits, and no request is in flight"
        self._write(min(seconds, to_event))
        if seconds < to_event:
            self._end(*next_server.pop())
        elif self.fleet.change(max(self._now, self.fleet.next_event)):
            self.look()
        self.fleet.fill_seats()
        self._admit(is_asked)
        return True

    def look(self) -> None:
        """Look at the servers."""
        is_blocked = self.fleet.has_free_seat() and self.queue.is_held(self._confirmed)
        self.fleet.look(self._now, is_blocked)

    def length_anew(self, request: SimulatedRequest) -> int:
        """Return the length of a response that goes on elsewhere, as if sampled from there: a new
        one among those longer than its earlier tokens."""
        draws = (self._draws(request.draw + _ANEW * number) for number in itertools.count(1000 * request.attempt))
        lengths = (draw.lengths[request.position] for draw in draws)
        return next(length for length in lengths if length > request.num_earlier)

    def _write(self, seconds: float) -> None:
        for server in self.fleet.servers:
            server.advance(seconds)
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        self._slot_seconds += seconds * self.fleet.num_in_flight

    def _end(self, request: SimulatedRequest, num_tokens: Mapping[int, int]) -> None:
        """Take in an answer."""
        if request.attempt:
            self.continued.append(request)
        samples = self._samples[request.uid]
        samples.append(_sample(request, num_tokens))
        if len(samples) == self._recipe.n:
            del self._samples[request.uid]
            self.queue.add_finished(replace(self._groups.pop(request.uid), samples=tuple(samples)))
            self.queue.decide()
            self._may_draw = True

    def _admit(self, is_asked: bool) -> None:
        """Draw allowed prompts: a wave if the trainer waits for a step, with K above 0 one after
        the other."""
        if self._recipe.max_staleness:
            while self._may_draw and self.fleet.has_free_seat():
                self._may_draw = self.queue.may_start(self.queue.num_open, self._confirmed)
                if self._may_draw:
                    self._draw()
            return
        for _ in range(self.queue.next_wave() if is_asked else 0):
            self._draw()

    def _draw(self) -> None:
        number = len(self.drawn)
        draw = self._draws(number)
        self.drawn.append(draw)
        prompt = Prompt(number, str(number), (0,), "", "", "")
        group = self.queue.draw(prompt, self._confirmed)
        self._groups[group.uid] = group
        self._samples[group.uid] = []
        for position, length in enumerate(draw.lengths):
            is_correct = position > 0 or not draw.has_signal
            request = SimulatedRequest(next(self._numbers), group.uid, length, is_correct, number, position)
            self.fleet.waiting.append(request)
        self.fleet.fill_seats()


def mean_length(lengths: Sequence[int]) -> float:
    """Return the mean number of tokens."""
    return sum(lengths) / len(lengths)


def mean_age(groups: Iterable[Group], weight_version: int) -> float:
    """Return the mean age of a token in a step that begins with this version:
    `rollout/staleness_mean` of the step."""
    num_tokens = 0
    age = 0
    for sample in (sample for group in groups for sample in group.samples):
        num_tokens += sample.num_written_tokens
        age += int(((weight_version - sample.weight_versions) * sample.loss_mask).sum())
    return age / num_tokens


def _sample(request: SimulatedRequest, num_tokens: Mapping[int, int]) -> Sample:
    """Return an answer with the fields read by the queue: length, correctness, weight versions.

    It has one entry per weight version; the entry's loss mask is its number of tokens.
    """
    return Sample(
        uid=request.uid,
        prompt_tokens=np.zeros(1, TOKEN),
        response_tokens=_tokens(request.length),
        rollout_log_probs=nothing(LOG_PROB),
        loss_mask=np.fromiter(num_tokens.values(), np.int64),  # its sum counts
        weight_versions=np.fromiter(num_tokens, np.int64),
        finish_reason="stop",
        raw_reward=float(request.is_correct),
        correct=request.is_correct,
        reward=float(request.is_correct),
        is_truncated=False,
    )


@cache
def _tokens(number: int) -> np.ndarray:
    """Return so many tokens, without their memory."""
    return repeated(0, number, TOKEN)


def _discarded_share(before: Account, after: Account) -> float:
    """Return the groups with signal that were discarded, of all that were generated between two
    accounts."""
    discarded = after.num_discarded - before.num_discarded
    handed = after.num_handed - before.num_handed
    filtered = after.num_filtered - before.num_filtered
    return discarded / (discarded + handed + filtered)
