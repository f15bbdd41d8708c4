"""The queue of groups between sampling and training: draws in their order, and the batches that they make.

Pure: no servers, no clock, no files. Every prompt that was drawn is, at any time, in exactly one place (`Account`):
handed out, filtered, discarded, ready, or open; of those that are out of the queue it has counts alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.samples import Group, PartialResponse, Prompt, Sample
from megatron_dapo.queue import admission
from megatron_dapo.queue.plain_data import (
    UNKNOWN_VERSION,
    draw_from_plain,
    draw_to_plain,
    group_from_plain,
    group_to_plain,
)
from megatron_dapo.queue.step_statistics import RolloutStep

FilterReason = Callable[[Sequence[Sample]], str | None]  # a group's samples -> why it has no signal, None = it has

_MEMORY = 0.75  # of the acceptance: what a step counts for, after another one


@dataclass(frozen=True)
class QueueLimits:
    """Sizes and rules of a `GroupQueue`.

    train_batch_size: groups per step; gen_batch_size: prompts per gen batch. max_num_gen_batches (0 or less: no limit)
    and on_exhausted: what ends a step early. masks: groups without signal stay in the step, marked, instead of being
    dropped. max_staleness: weight versions between the oldest new token of a group
    and the step that trains on it. total_steps: of the run.
    """

    train_batch_size: int
    gen_batch_size: int
    max_num_gen_batches: int = 1
    on_exhausted: str = "raise"
    masks: bool = False
    max_staleness: int = 0
    total_steps: int = 1 << 62

    @property
    def max_draws(self) -> int:
        """Return how many draws one batch may take."""
        return self.max_num_gen_batches * self.gen_batch_size if self.max_num_gen_batches > 0 else 1 << 62


@dataclass(frozen=True)
class Account:
    """What became of all draws of a run: numbers of groups.

    ready: they have signal and wait for their step. open: it is not decided yet whether they have.
    """

    num_drawn: int
    num_handed: int
    num_filtered: int
    num_discarded: int
    num_ready: int
    num_open: int

    @property
    def is_closed(self) -> bool:
        """Return whether every draw is in exactly one place."""
        out = self.num_handed + self.num_filtered + self.num_discarded
        return self.num_drawn == out + self.num_ready + self.num_open


class GroupQueue:
    """Draws, and the batches of groups that they make.

    `draw` -> `add_sample` as responses come -> `add_finished` -> `decide` -> `take` while a step `is_ready`; `begin`
    says which step is asked for, with which weights.

    Whether a group has signal is decided in the order of the draws: who answers first has no say in what is trained on.
    Groups with signal make batches of `train_batch_size`, one after the other. A batch that took `max_draws` draws and
    is not full is exhausted: `on_exhausted` hands it out as it is, or ends the run.

    Each step is one weight version later than the last. With `max_staleness` 0 a step is trained on the weights that
    wrote it: prompts are drawn in waves, and what a wave has too much of is discarded when the step ends, the last
    draws first. With more, prompts are drawn one by one as `admission.paced` allows, and nothing is discarded.
    """

    def __init__(self, limits: QueueLimits, filter_reason: FilterReason) -> None:
        self.limits = limits
        self._filter_reason = filter_reason
        self._num_drawn = 0
        self._gone: Counter[str] = Counter()  # handed | filtered | discarded -> groups, in the run
        self._batches: list[list[Group]] = []  # those that are full, or exhausted
        self._kept: list[Group] = []  # of the batch that is being filled
        self._num_draws_used = 0  # by that batch
        self._open: dict[str, Group] = {}  # uid -> group with the samples that it has, in the order drawn
        self._finished: set[str] = set()  # uids of open groups that have all their samples
        self._steps: list[RolloutStep] = []  # the one that is asked for, and those that are decided on ahead of it
        self._weight_version = 0  # with which the step was asked for
        self._num_steps: int | None = None  # number of the last step that was handed out; None: not known yet
        self._num_recent = [0.0, 0.0]  # groups with signal, and groups decided: sums over steps that fade

    # ------------------------------------------------------------------------------------------------ what there is

    @property
    def num_ready(self) -> int:
        """Return the number of groups with signal that wait."""
        return sum(map(len, self._batches)) + len(self._kept)

    @property
    def num_open(self) -> int:
        """Return the number of draws of which it is not decided whether they have signal."""
        return len(self._open)

    @property
    def num_groups_wanted(self) -> int:
        """Return how many groups the next step still needs, not counting open ones."""
        return 0 if self._batches else self.limits.train_batch_size - len(self._kept)

    @property
    def num_steps(self) -> int | None:
        """Return the number of the last step that was handed out; None before the first `begin`."""
        return self._num_steps

    @property
    def acceptance(self) -> float:
        """Return the share of recent groups that had signal: in the last few steps, by the order of draws.

        As long as none was decided it is that with which a gen batch fills a step.
        """
        num_kept, num_decided = self._num_recent
        first = min(self.limits.train_batch_size / self.limits.gen_batch_size, 1.0)
        return num_kept / num_decided if num_decided else first

    @property
    def account(self) -> Account:
        """Return what became of all draws."""
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
        """Return the number of open groups that lack samples."""
        return len(self._open) - len(self._finished)

    @property
    def open_groups(self) -> list[Group]:
        """Return all open groups in the order drawn, with the samples that they have."""
        return list(self._open.values())

    def is_finished(self, uid: str) -> bool:
        """Return whether the open group has all its samples."""
        return uid in self._finished

    # ------------------------------------------------------------------------------------------------ what is allowed

    def may_start(self, position: int, weight_version: int) -> bool:
        """Return whether the open group at this position, or a draw that would get it, may be sampled now by servers
        that hold weight_version (`admission.paced`)."""
        return self._num_steps is not None and admission.paced(
            num_steps=self._num_steps,
            size=self.limits.train_batch_size,
            num_ready=self._num_places_taken,
            num_open=position,
            version=weight_version,
            max_staleness=self.limits.max_staleness,
            total_steps=self.limits.total_steps,
        )

    def next_wave(self) -> int:
        """Return how many prompts to draw for the step that is asked for, where `max_staleness` is 0."""
        if self._open or self._batches:
            return 0
        size = admission.wave_size(
            size=self.limits.train_batch_size,
            num_ready=len(self._kept),
            gen_batch_size=self.limits.gen_batch_size,
            acceptance=self.acceptance,
        )
        return min(size, self.limits.max_draws - self._num_draws_used)

    # ------------------------------------------------------------------------------------------------ draws

    def draw(self, prompt: Prompt, weight_version: int, replayed: Sample | None = None) -> Group:
        """Take in the next prompt that is drawn; return its open group.

        weight_version: that the servers hold. replayed: the trajectory that the group borrows, if any.
        """
        uid = f"{self._num_drawn:08d}-{prompt.index}"
        samples = (replace(replayed, uid=uid, exp_mask=True, number=0),) if replayed else ()
        self._open[uid] = Group(uid, prompt, samples, version=weight_version)
        self._num_drawn += 1
        return self._open[uid]

    def renew(self, uid: str, weight_version: int) -> Group:
        """Return an open group that is to be sampled now, with its partial responses, which are not held here any more.
        One that would be too old when its step comes begins anew with weight_version. So may a group be of a state that
        was saved with a larger `max_staleness`."""
        group = self._open[uid]
        assert self._num_steps is not None, "begin() comes first"
        num_before = self._num_places_taken + list(self._open).index(uid)
        num_steps_before = num_before // self.limits.train_batch_size if self.limits.max_staleness else 0
        if self._num_steps + num_steps_before - group.version > self.limits.max_staleness:
            group = _without_samples(group, weight_version)
        self._open[uid] = replace(group, partials=())
        return group

    def add_partial(self, uid: str, partial: PartialResponse) -> None:
        """Take in what there is of a response of an open group that is not sampled any more."""
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
        self._finished.add(group.uid)

    def forget_samples(self) -> None:
        """Have all open groups sampled anew."""
        self._finished.clear()
        self._open = self._opened_anew()

    @property
    def finished_head(self) -> list[Group]:
        """Return the finished groups that `decide` would look at, in the order drawn."""
        if self._is_exhausted or (self.limits.max_staleness == 0 and self.num_unfinished):
            return []
        return list(takewhile(lambda group: group.uid in self._finished, self._open.values()))

    def decide(self) -> list[Group]:
        """Decide on the finished groups at the head of the draws, with `max_staleness` 0 on a wave when it is finished.

        Returns them in the order drawn; those that are dropped are not held here any more.
        """
        decided: list[Group] = []
        for group in self.finished_head:
            if self._is_exhausted:
                break
            del self._open[group.uid]
            self._finished.remove(group.uid)
            self._decide_on(group)
            decided.append(group)
        return decided

    def _decide_on(self, group: Group) -> None:
        step = self._step_of_decisions()
        reason = self._filter_reason(group.samples)
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
        is_short = self._is_exhausted and self.limits.on_exhausted != "raise" and self._kept
        if len(self._kept) == self.limits.train_batch_size or is_short:
            self._close_batch()

    def _close_batch(self) -> None:
        self._batches.append(self._kept)
        self._kept = []
        self._num_draws_used = 0

    # ------------------------------------------------------------------------------------------------ steps

    @property
    def _step(self) -> RolloutStep:
        assert self._steps, "begin() comes first"
        return self._steps[0]

    def _step_of_decisions(self) -> RolloutStep:
        """Return the step that counts the next decision: that of the batch which is being filled. With `max_staleness`
        0 it is the one that is asked for, whatever its wave has too much of."""
        index = len(self._batches) if self.limits.max_staleness else 0
        while len(self._steps) <= index:
            self._steps.append(RolloutStep(number=self._step.number + len(self._steps)))
        return self._steps[index]

    def begin(self, step: int, weight_version: int) -> None:
        """Say that this step is asked for, with these weights; again after a push.

        Groups of a saved state that are too old for it are discarded. With `max_staleness` 0 so are draws that a
        run which was further ahead left open: all where the step is ready, else those that no wave has room for.
        """
        if not self._steps or self._step.number != step:
            self._steps = [RolloutStep(number=step)]
        self._weight_version = weight_version
        self._num_steps = step - 1
        self._open = {
            uid: replace(group, version=weight_version) if group.version == UNKNOWN_VERSION else group
            for uid, group in self._open.items()
        }
        self._discard_stale()
        if not self.limits.max_staleness:
            self._discard_open(0 if self._batches else self.limits.gen_batch_size)
        if self._step.num_ready is None:
            self._step.num_ready = self.num_ready

    def is_ready(self) -> bool:
        """Return whether the step can be taken.

        Raises UserError at `max_num_gen_batches` where the policy is `raise`, or where there is not one group.
        """
        if self._is_exhausted and not self._batches:
            message = self._exhausted()
            self._num_draws_used = 0  # who starts the run again has as many again
            raise UserError(message)
        return bool(self._batches) and (self.limits.max_staleness > 0 or not self._open)

    def take(self) -> RolloutStep:
        """End the step and return it, with the groups that it has."""
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
        """Return plain data (plain_data.py), of an open step too.

        with_samples: False leaves out the responses, so that ready groups are open again, in their places.
        with_open_samples: False leaves out those of open groups alone.
        """
        opened = self._open if with_open_samples else self._opened_anew()
        finished = self._finished if with_open_samples else set()
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
            "step": self._step.state_dict() if self._steps else None,
            "steps_ahead": [step.state_dict() for step in self._steps[1:]],
        }
        if with_samples:
            return state
        drawn = [*(_without_samples(group, group.version) for group in ready), *self._opened_anew().values()]
        step = RolloutStep(self._step.number).state_dict() if self._steps else None
        none = {"kept": [], "batch_sizes": [], "num_draws_used": 0, "finished": [], "steps_ahead": []}
        return state | none | {"open": [draw_to_plain(group) for group in drawn], "step": step}

    def load_state_dict(self, state: dict) -> None:
        """Go on where a saved queue stood, also that of a program with gen batches. Nothing is drawn before `begin`."""
        self._num_drawn = state["num_drawn"]
        step = state.get("step")
        self._steps = [RolloutStep.from_state(each) for each in (step, *state.get("steps_ahead", ())) if each]
        self._num_steps = None
        self._num_recent = list(state.get("num_recent", (0.0, 0.0)))
        num_draws_used = (step or {}).get("num_gen_batches", 0) * self.limits.gen_batch_size
        self._num_draws_used = state.get("num_draws_used", num_draws_used)
        self._put_ready([group_from_plain(plain) for plain in state["kept"]], state.get("batch_sizes", ()))
        finished = {plain["uid"]: group_from_plain(plain) for plain in state["finished"]}
        self._finished = set(finished)
        self._open = {plain["uid"]: finished.get(plain["uid"]) or draw_from_plain(plain) for plain in state["open"]}
        gone = {"handed": self._num_drawn - self.num_ready - self.num_open}  # or filtered, or discarded
        self._gone = Counter(state.get("gone", gone))

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _num_places_taken(self) -> int:
        """Return how many places in steps the ready groups take at most.

        A batch that may be handed out short takes `train_batch_size`; and where no further draw has signal, the one
        that is being filled ends after the draws that it has left, of which each may be such a place. So a step that is
        short makes no group older than it may be.
        """
        size = self.limits.train_batch_size
        num_draws_left = self.limits.max_draws - self._num_draws_used
        return len(self._batches) * size + max(len(self._kept), size - num_draws_left)

    @property
    def _is_exhausted(self) -> bool:
        return self._num_draws_used >= self.limits.max_draws

    def _opened_anew(self) -> dict[str, Group]:
        """Return the open groups as they were drawn."""
        return {uid: _without_samples(group, group.version) for uid, group in self._open.items()}

    def _is_fresh(self, group: Group) -> bool:
        """Return whether the step may train on the group. Its draw tells without a look at its tokens, in most
        cases."""
        oldest = self._weight_version - self.limits.max_staleness
        return group.version >= oldest or staleness(group, self._weight_version) <= self.limits.max_staleness

    def _discard_stale(self) -> None:
        """Discard ready groups that the step may not train on, and have finished ones sampled anew."""
        for uid in [uid for uid in self._finished if not self._is_fresh(self._open[uid])]:
            self._finished.remove(uid)
            self._open[uid] = _without_samples(self._open[uid], self._weight_version)
        ready = [group for batch in (*self._batches, self._kept) for group in batch]
        fresh = [group for group in ready if self._is_fresh(group)]
        if len(fresh) < len(ready):
            self._discard(len(ready) - len(fresh))
            self._put_ready(fresh)

    def _discard_open(self, num_left: int) -> None:
        """Discard the last open groups, so that no more than num_left are left."""
        uids = list(self._open)[num_left:]
        self._open = dict(list(self._open.items())[:num_left])
        self._finished.difference_update(uids)
        self._discard(len(uids))

    def _discard(self, number: int) -> None:
        self._step.num_discarded += number
        self._gone["discarded"] += number

    def _put_ready(self, groups: Sequence[Group], sizes: Sequence[int] = ()) -> None:
        """Have these groups wait, in batches of these sizes, then in full ones."""
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


def staleness(group: Group, weight_version: int) -> int:
    """Return the versions between the oldest token that was written for the group and weight_version. A replayed
    sample was not written for it."""
    new = (sample.weight_versions for sample in group.samples if not sample.exp_mask)
    return weight_version - min((int(versions.min()) for versions in new if len(versions)), default=weight_version)


def _without_samples(group: Group, weight_version: int) -> Group:
    """Return the group as it is drawn with these weights."""
    replayed = tuple(sample for sample in group.samples if sample.exp_mask)
    return Group(group.uid, group.prompt, replayed, version=weight_version)
