"""The queue of groups between sampling and training: draws in their order, and batches of them.

Pure: no servers, no clock, no files. At any time every drawn prompt is in exactly one place
(`Account`): handed out, filtered, discarded, ready or open. Groups that left the queue are only
counted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.samples import Group, PartialResponse, Prompt, Sample
from megatron_dapo.queue import admission
from megatron_dapo.queue.account import Account
from megatron_dapo.queue.plain_data import draw_from_plain, draw_to_plain, group_from_plain, group_to_plain
from megatron_dapo.queue.step_statistics import RolloutStep

FilterReason = Callable[[Sequence[Sample]], str | None]
"""A group's samples -> the reason for its lack of signal; None with signal."""

_MEMORY = 0.75  # weight of a step in the acceptance, relative to the step after it


@dataclass(frozen=True)
class QueueLimits:
    """Sizes and rules of a `GroupQueue`.

    A record of its own, not a config section: the rules come from four sections, two of them
    exclusive (`make_queue`). Besides, the plan simulates a queue without a config.
    """

    train_batch_size: int  # groups per step
    gen_batch_size: int  # prompts per gen batch
    max_num_gen_batches: int = 1  # of a step; 0 or less = no limit
    on_exhausted: str = "raise"  # at that limit: or "train_partial"
    masks: bool = False  # groups without signal stay in the step, marked, instead of being dropped
    # weight versions between a group's oldest new token and its training step
    max_staleness: int = 0
    total_steps: int = 1 << 62  # of the run

    @property
    def max_draws(self) -> int:
        """Return the most draws of one batch."""
        return self.max_num_gen_batches * self.gen_batch_size if self.max_num_gen_batches > 0 else 1 << 62


@dataclass(frozen=True)
class Verdict:
    """The filter's answer about a finished group."""

    reason: str | None  # for its lack of signal
    is_empty: bool  # it takes no place in a step. Without all scores it may be sampled again


class GroupQueue:
    """Draws, and the batches made of their groups.

    `draw` -> `add_sample` for each response -> `add_finished` -> `decide` -> `take` once a step
    `is_ready`; `begin` names the current step and its weights.

    Groups are decided on in the order of the draws: the order of answers has no effect on training.
    Groups with signal make batches of `train_batch_size`, one after the other. A batch short of
    groups after `max_draws` draws is exhausted: `on_exhausted` hands it out as it is, or ends the
    run.

    Each step is one weight version later than the last. With `max_staleness` 0 a step trains the
    weights that wrote it: prompts are drawn in waves, and surplus groups are discarded when the
    step ends, the last draws first. Above 0 prompts are drawn one by one as `admission.may_draw`
    allows, and nothing is discarded.
    """

    def __init__(self, limits: QueueLimits, filter_reason: FilterReason) -> None:
        self.limits = limits
        self._filter_reason = filter_reason
        self._num_drawn = 0
        self._gone: Counter[str] = Counter()  # handed | filtered | discarded -> groups, in the run
        self._batches: list[list[Group]] = []  # full or exhausted
        self._kept: list[Group] = []  # of the batch being filled
        self._num_draws_used = 0  # by that batch
        # uid -> group with its samples so far, in the order drawn
        self._open: dict[str, Group] = {}
        self._finished: dict[str, Verdict] = {}  # of open groups with all their samples
        self._steps: list[RolloutStep] = []  # the current step, and the steps filled ahead of it
        self._weight_version = 0  # of the current step
        # number of the last step handed out; None before `begin`
        self._num_steps: int | None = None
        # groups with signal, and groups decided: sums over steps that fade
        self._num_recent = [0.0, 0.0]

    # ------------------------------------------------------------------------------------ contents

    @property
    def num_ready(self) -> int:
        """Return the number of waiting groups with signal."""
        return sum(map(len, self._batches)) + len(self._kept)

    @property
    def num_open(self) -> int:
        """Return the number of draws not decided on."""
        return len(self._open)

    @property
    def num_groups_wanted(self) -> int:
        """Return the number of groups lacking in the next step; open ones do not count."""
        return 0 if self._batches else self.limits.train_batch_size - len(self._kept)

    @property
    def num_steps(self) -> int | None:
        """Return the number of the last step handed out; None before the first `begin`."""
        return self._num_steps

    @property
    def acceptance(self) -> float:
        """Return the share of groups with signal in the last few steps.

        Before the first decision: the share with which one gen batch fills a step.
        """
        num_kept, num_decided = self._num_recent
        first = min(self.limits.train_batch_size / self.limits.gen_batch_size, 1.0)
        return num_kept / num_decided if num_decided else first

    @property
    def account(self) -> Account:
        """Return the places of all draws."""
        return Account(
            num_drawn=self._num_drawn,
            num_handed=self._gone["handed"],
            num_filtered=self._gone["filtered"],
            num_discarded=self._gone["discarded"],
            num_ready=self.num_ready,
            num_open=self.num_open,
        )

    @property
    def num_unfinished(self) -> int:
        """Return the number of open groups with samples missing."""
        return len(self._open) - len(self._finished)

    @property
    def open_groups(self) -> list[Group]:
        """Return all open groups in the order drawn, with their samples so far."""
        return list(self._open.values())

    def is_finished(self, uid: str) -> bool:
        """Return whether the open group has all its samples."""
        return uid in self._finished

    # ----------------------------------------------------------------------------------- admission

    def may_start(self, position: int, weight_version: int) -> bool:
        """Return whether weight_version may sample the open group at this position.

        The rules are `admission.may_draw` and `admission.most_open`. They also hold for a draw at
        the position, and refuse all positions after a refused one.
        """
        limits = self.limits
        most_open = admission.most_open(size=limits.train_batch_size, max_staleness=limits.max_staleness)
        if self._num_steps is None or position >= most_open:
            return False
        return admission.may_draw(
            num_steps=self._num_steps,
            num_batches=self._num_batches_before(position),
            version=weight_version,
            max_staleness=limits.max_staleness,
            total_steps=limits.total_steps,
        )

    def is_held(self, weight_version: int) -> bool:
        """Return whether only `max_staleness` keeps free slots from new prompts.

        With 0 they are kept until the wave is finished.
        """
        return not self.may_start(self.num_open, weight_version) if self.limits.max_staleness else bool(self._open)

    def next_wave(self) -> int:
        """Return the number of prompts to draw now for the step; only with `max_staleness` 0."""
        if self._open or self._batches:
            return 0
        size = admission.wave_size(
            size=self.limits.train_batch_size,
            num_ready=len(self._kept),
            gen_batch_size=self.limits.gen_batch_size,
            acceptance=self.acceptance,
        )
        return min(size, self.limits.max_draws - self._num_draws_used)

    # ---------------------------------------------------------------------------------------- draws

    def draw(self, prompt: Prompt, weight_version: int, replayed: Sample | None = None) -> Group:
        """Open a group for a drawn prompt and return it.

        weight_version: of the servers. replayed: a trajectory borrowed by the group.
        """
        uid = f"{self._num_drawn:08d}-{prompt.index}"
        samples = (replace(replayed, uid=uid, exp_mask=True, number=0),) if replayed else ()
        self._open[uid] = Group(uid, prompt, samples, version=weight_version)
        self._num_drawn += 1
        return self._open[uid]

    def renew(self, uid: str, weight_version: int) -> Group:
        """Hand out an open group to be sampled, with its partial responses.

        A group too old for its step begins anew with weight_version. A state saved with a larger
        `max_staleness` may hold such groups.
        """
        group = self._open[uid]
        assert self._num_steps is not None, "begin() comes first"
        position = list(self._open).index(uid)
        num_steps_before = self._num_batches_before(position) if self.limits.max_staleness else 0
        if self._num_steps + num_steps_before - group.version > self.limits.max_staleness:
            group = _without_samples(group, weight_version)
        self._open[uid] = replace(group, partials=())
        return group

    def add_partial(self, uid: str, partial: PartialResponse) -> None:
        """Take in an unfinished response of an open group after the end of its sampling."""
        group = self._open[uid]
        self._open[uid] = replace(group, partials=(*group.partials, partial))

    def add_sample(self, sample: Sample) -> None:
        """Take in a finished sample of an open group."""
        group = self._open[sample.uid]
        self._open[sample.uid] = replace(group, samples=(*group.samples, sample))

    def add_finished(self, group: Group) -> None:
        """Take in an open group with all its samples."""
        assert group.uid in self._open, f"group {group.uid} was not asked for"
        assert group.uid not in self._finished, f"group {group.uid} came twice"
        self._open[group.uid] = group
        self._finished[group.uid] = self._verdict(group)

    def forget_samples(self) -> None:
        """Have all open groups sampled anew."""
        self._finished.clear()
        self._open = self._opened_anew()

    @property
    def finished_head(self) -> list[Group]:
        """Return the groups due in `decide`, in the order drawn."""
        if self._is_exhausted or (self.limits.max_staleness == 0 and self.num_unfinished):
            return []
        return list(takewhile(lambda group: group.uid in self._finished, self._open.values()))

    def decide(self) -> list[Group]:
        """Decide on the finished groups at the head of the draws.

        With `max_staleness` 0 only finished waves are decided on. Returns the groups in the order
        drawn, and keeps no dropped ones.
        """
        decided: list[Group] = []
        for group in self.finished_head:
            if self._is_exhausted:
                break
            del self._open[group.uid]
            self._decide_on(group, self._finished.pop(group.uid).reason)
            decided.append(group)
        return decided

    def _verdict(self, group: Group) -> Verdict:
        reason = self._filter_reason(group.samples)
        is_dropped = reason is not None and not self.limits.masks
        return Verdict(reason, is_dropped and all(sample.reward_error is None for sample in group.samples))

    def _decide_on(self, group: Group, reason: str | None) -> None:
        step = self._step_of_decisions()
        step.generated.add(group, is_filtered=reason is not None)
        if reason is not None:
            step.filtered[reason] += 1
            step.num_filtered_samples += len(group.samples)
        is_kept = reason is None or self.limits.masks
        self._num_recent[0] += is_kept
        self._num_recent[1] += 1
        self._num_draws_used += 1
        if is_kept:
            self._kept.append(replace(group, keep=reason is None))
        else:
            self._gone["filtered"] += 1
            step.dropped.add(group, is_filtered=True)
        is_short = self._is_exhausted and self.limits.on_exhausted != "raise" and self._kept
        if len(self._kept) == self.limits.train_batch_size or is_short:
            self._close_batch()

    def _close_batch(self) -> None:
        self._batches.append(self._kept)
        self._kept = []
        self._num_draws_used = 0

    # ---------------------------------------------------------------------------------------- steps

    @property
    def _step(self) -> RolloutStep:
        assert self._steps, "begin() comes first"
        return self._steps[0]

    def _step_of_decisions(self) -> RolloutStep:
        """Return the step of the batch being filled; it counts the next decision.

        With `max_staleness` 0 it is the current step, also for the surplus of its wave.
        """
        index = len(self._batches) if self.limits.max_staleness else 0
        while len(self._steps) <= index:
            self._steps.append(RolloutStep(number=self._step.number + len(self._steps)))
        return self._steps[index]

    def begin(self, step: int, weight_version: int) -> None:
        """Ask for a step, with its weights; called again after a push.

        Groups of a saved state too old for it are discarded. With `max_staleness` 0 so are open
        draws of a run that was further ahead: all if the step is ready, else those beyond a wave.
        """
        if not self._steps or self._step.number != step:
            self._steps = [RolloutStep(number=step)]
        self._weight_version = weight_version
        self._num_steps = step - 1
        self._discard_stale()
        if not self.limits.max_staleness:
            self._discard_open(0 if self._batches else self.limits.gen_batch_size)
        if self._step.num_ready is None:
            self._step.num_ready = self.num_ready

    def is_ready(self) -> bool:
        """Return whether the step can be taken.

        Raises UserError at `max_num_gen_batches` if `on_exhausted` is raise, or without a single
        group.
        """
        if self._is_exhausted and not self._batches:
            message = self._exhausted()
            self._num_draws_used = 0  # a restarted run has all of them again
            raise UserError(message)
        return bool(self._batches) and (self.limits.max_staleness > 0 or not self._open)

    def take(self) -> RolloutStep:
        """End the step and return it with its groups."""
        step = self._step
        if not self._batches:
            self._close_batch()
        step.groups = tuple(self._batches.pop(0))
        step.num_gen_batches = step.generated.num_groups / self.limits.gen_batch_size
        self._gone["handed"] += len(step.groups)
        if not self.limits.max_staleness:
            assert not self._open, "the wave is not finished"
            self._discard(self.num_ready)
            self._batches = []
            self._kept = []
            self._num_draws_used = 0
        self._num_recent = [number * _MEMORY for number in self._num_recent]
        self._num_steps = step.number
        ahead = self._steps[1:] if self.limits.max_staleness else []
        self._steps = ahead or [RolloutStep(number=step.number + 1)]
        return step

    def state_dict(self, with_samples: bool = True, with_open_samples: bool = True) -> dict:
        """Return plain data (plain_data.py), also in the middle of a step.

        with_samples: False leaves out all responses: ready groups are open again, in their places.
        with_open_samples: False leaves out the responses of open groups.
        """
        opened = self._open if with_open_samples else self._opened_anew()
        finished = self._finished if with_open_samples else {}
        ready = [group for batch in (*self._batches, self._kept) for group in batch]
        state = {
            "num_drawn": self._num_drawn,
            "gone": dict(self._gone),
            "kept": [group_to_plain(group) for group in ready],
            "batch_sizes": [len(batch) for batch in self._batches],
            "num_draws_used": self._num_draws_used,
            "num_recent": self._num_recent,
            "open": [{"uid": uid} if uid in finished else draw_to_plain(group) for uid, group in opened.items()],
            "finished": [group_to_plain(group) for uid, group in opened.items() if uid in finished],
            **_plain_steps(self._steps),
        }
        if with_samples:
            return state
        drawn = [*(_without_samples(group, group.version) for group in ready), *self._opened_anew().values()]
        none = {"kept": [], "batch_sizes": [], "num_draws_used": 0, "finished": []}
        steps = _plain_steps(self._steps, with_kept=False)
        return state | none | {"open": [draw_to_plain(group) for group in drawn]} | steps

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved queue. Nothing is drawn before `begin`."""
        self._num_drawn = state["num_drawn"]
        self._gone = Counter(state["gone"])
        self._steps = [RolloutStep.from_state(step) for step in (state["step"], *state["steps_ahead"]) if step]
        self._num_steps = None
        self._num_recent = list(state["num_recent"])
        self._num_draws_used = state["num_draws_used"]
        self._put_ready([group_from_plain(plain) for plain in state["kept"]], state["batch_sizes"])
        finished = {plain["uid"]: group_from_plain(plain) for plain in state["finished"]}
        self._finished = {uid: self._verdict(group) for uid, group in finished.items()}
        self._open = {plain["uid"]: finished.get(plain["uid"]) or draw_from_plain(plain) for plain in state["open"]}

    # --------------------------------------------------------------------------------------- inside

    def _num_batches_before(self, position: int) -> int:
        """Return the most batches that ready groups and the first open draws can make.

        At its limit of draws the batch being filled counts as one.
        """
        verdicts = map(self._finished.get, islice(self._open, position))
        num_kept, num_used = (0, 0) if self._is_exhausted else (len(self._kept), self._num_draws_used)
        num_closed = admission.batches_closed(
            (verdict is None or not verdict.is_empty for verdict in verdicts),
            num_kept=num_kept,
            num_used=num_used,
            size=self.limits.train_batch_size,
            max_draws=self.limits.max_draws,
        )
        return len(self._batches) + self._is_exhausted + num_closed

    @property
    def _is_exhausted(self) -> bool:
        return self._num_draws_used >= self.limits.max_draws

    def _opened_anew(self) -> dict[str, Group]:
        """Return the open groups as they were drawn."""
        return {uid: _without_samples(group, group.version) for uid, group in self._open.items()}

    def _is_fresh(self, group: Group) -> bool:
        """Return whether the step may train on the group.

        The version at its draw mostly decides, without a look at its tokens.
        """
        oldest = self._weight_version - self.limits.max_staleness
        return group.version >= oldest or staleness(group, self._weight_version) <= self.limits.max_staleness

    def _discard_stale(self) -> None:
        """Discard ready groups too old for the step; have finished ones sampled anew.

        Not those without a place: they train nothing, and draws behind them count on it.
        """
        uids = [uid for uid, verdict in self._finished.items() if not verdict.is_empty]
        for uid in (uid for uid in uids if not self._is_fresh(self._open[uid])):
            del self._finished[uid]
            self._open[uid] = _without_samples(self._open[uid], self._weight_version)
        ready = [group for batch in (*self._batches, self._kept) for group in batch]
        fresh = [group for group in ready if self._is_fresh(group)]
        if len(fresh) < len(ready):
            self._discard(len(ready) - len(fresh))
            self._put_ready(fresh)
            # discarded groups, and those dropped beside them, use up no draws of a batch
            self._num_draws_used = len(self._kept)

    def _discard_open(self, num_left: int) -> None:
        """Discard the last open groups beyond num_left."""
        uids = list(self._open)[num_left:]
        self._open = dict(list(self._open.items())[:num_left])
        self._finished = {uid: verdict for uid, verdict in self._finished.items() if uid in self._open}
        self._discard(len(uids))

    def _discard(self, number: int) -> None:
        self._step.num_discarded += number
        self._gone["discarded"] += number

    def _put_ready(self, groups: Sequence[Group], sizes: Sequence[int] = ()) -> None:
        """Let these groups wait: in batches of these sizes, then in full ones."""
        size = self.limits.train_batch_size
        self._batches = []
        rest = list(groups)
        for batch_size in (*sizes, *[size] * ((len(rest) - sum(sizes)) // size)):
            self._batches.append(rest[:batch_size])
            rest = rest[batch_size:]
        self._kept = rest

    def _exhausted(self) -> str:
        limits = self.limits
        step = self._step
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(step.filtered.items())) or "none dropped"
        return (
            f"algorithm.dynamic_sampling.max_num_gen_batches = {limits.max_num_gen_batches} gen batches gave "
            f"{len(self._kept)} of the {limits.train_batch_size} groups that rollout step {step.number} needs "
            f"(dropped of {step.generated.num_groups} generated: {reasons}): change the data or the model so that the "
            "responses of a group differ, raise max_num_gen_batches or data.gen_batch_size, or set "
            "on_exhausted=train_partial (which needs at least one group)."
        )


def _plain_steps(steps: Sequence[RolloutStep], with_kept: bool = True) -> dict:
    """Return a state's current step and the steps ahead. with_kept: as `RolloutStep.state_dict`."""
    plain = [step.state_dict(with_kept) for step in steps]
    return {"step": plain[0] if plain else None, "steps_ahead": plain[1:]}


def staleness(group: Group, weight_version: int) -> int:
    """Return the versions between the group's oldest new token and weight_version.

    Replayed samples are not new.
    """
    new = (each.weight_versions for sample in group.samples if not sample.exp_mask for each in sample.branches)
    return weight_version - min((int(versions.min()) for versions in new if len(versions)), default=weight_version)


def _without_samples(group: Group, weight_version: int) -> Group:
    """Return the group as if drawn with these weights."""
    replayed = tuple(sample for sample in group.samples if sample.exp_mask)
    return Group(group.uid, group.prompt, replayed, version=weight_version)
