"""The queue of groups between sampling and training: which groups are kept, dropped or left for the next step.

Pure: no servers, no clock, no files. Every prompt that was drawn is, at any time, in exactly one place: handed out,
filtered, discarded, waiting, or in the open gen batch; of those that are out of the queue it has counts alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.types import Group, Prompt, Sample
from megatron_dapo.rollout.plain_data import (
    group_from_plain,
    group_to_plain,
    prompt_from_plain,
    prompt_to_plain,
    sample_from_plain,
    sample_to_plain,
)
from megatron_dapo.rollout.step_statistics import StepStatistics

FilterReason = Callable[[Sequence[Sample]], str | None]  # a group's samples -> why it has no signal, None = it has


@dataclass(frozen=True)
class QueueLimits:
    """Sizes and rules of a `GroupQueue`.

    train_batch_size: groups per step; gen_batch_size: prompts per gen batch. max_num_gen_batches (0 or less: no limit)
    and on_exhausted: what ends a step early; section: where the config says so. masks: groups without signal stay in
    the step, marked, instead of being dropped. max_staleness: weight versions between the oldest new token of a group
    and the step that trains on it.
    """

    train_batch_size: int
    gen_batch_size: int
    max_num_gen_batches: int = 1
    on_exhausted: str = "raise"
    masks: bool = False
    section: str = "algorithm.dapo.dynamic_sampling"
    max_staleness: int = 0


@dataclass
class RolloutStep:
    """One rollout step: its counts while it is filled, and with `GroupQueue.take` its groups."""

    number: int
    num_gen_batches: int = 0
    num_surplus_used: int = 0  # how many of `groups` an earlier step generated
    num_filtered_samples: int = 0
    num_discarded: int = 0  # groups with signal that are too old to be trained on, or would be in the next step
    filtered: Counter[str] = field(default_factory=Counter)  # reason -> groups, dropped or masked
    generated: StepStatistics = field(default_factory=StepStatistics)  # of all groups generated, kept or not
    # to train on, in the order in which their prompts were drawn: surplus of earlier steps first
    groups: tuple[Group, ...] = ()

    def state_dict(self) -> dict:
        """Return plain data. A step that is being filled has no groups: they are the queue's."""
        counts = {name: value for name, value in vars(self).items() if name != "groups"}
        return {**counts, "filtered": dict(self.filtered), "generated": self.generated.state_dict()}

    @classmethod
    def from_state(cls, state: dict) -> "RolloutStep":
        """Return the step that `state_dict` described."""
        step = cls(**{**state, "filtered": Counter(state["filtered"]), "generated": StepStatistics()})
        step.generated.load_state_dict(state["generated"])
        return step


class GroupQueue:
    """The groups of rollout steps: waiting ones, and those of the open gen batch.

    `begin` -> while `wants_gen_batch`: `open_gen_batch`, `add_finished` every one of `missing`, `close_gen_batch` ->
    `take`. A gen batch is judged only when all its groups are there: who answers first has no say in what is trained
    on.
    `begin` with the number of the step that is still open goes on with it, its counts and its open gen batch.
    Each step is one weight version later than the last. With `max_staleness` 0 a step is trained on the weights that
    wrote it: what it has too much of is discarded when it ends, the last draws first.
    """

    def __init__(self, limits: QueueLimits, filter_reason: FilterReason) -> None:
        self.limits = limits
        self._filter_reason = filter_reason
        self._num_drawn = 0
        self._kept: list[Group] = []  # between steps this is the surplus
        self._open: dict[str, Group] = {}  # uid -> group of the open gen batch as it was drawn, in the order drawn
        self._finished: dict[str, Group] = {}  # uid -> the same group with its responses
        self._open_step: RolloutStep | None = None
        self._weight_version = 0  # of the step under way

    @property
    def _step(self) -> RolloutStep:
        assert self._open_step is not None, "begin() comes first"
        return self._open_step

    def begin(self, step: int, weight_version: int) -> None:
        """Begin the step that is sampled by these weights, or go on with it. Groups of a saved state that are too old
        for it go: waiting ones are discarded, those of the open gen batch are missing again."""
        is_new = self._open_step is None or self._open_step.number != step
        if is_new:
            self._open_step = RolloutStep(number=step)
        self._weight_version = weight_version
        self._discard_stale(weight_version)
        self._finished = {uid: group for uid, group in self._finished.items() if self._is_fresh(group, weight_version)}
        if is_new:
            self._step.num_surplus_used = min(len(self._kept), self.limits.train_batch_size)

    @property
    def has_open_gen_batch(self) -> bool:
        """Return whether there are prompts that were drawn and not judged."""
        return bool(self._open)

    @property
    def num_groups_wanted(self) -> int:
        """Return how many groups the step still needs, not counting the open gen batch, which is not judged yet."""
        return max(self.limits.train_batch_size - len(self._kept), 0)

    def wants_gen_batch(self) -> bool:
        """Return True while the step is not full and its gen batches are not used up.

        Raises UserError at `max_num_gen_batches` where the policy is `raise`, or where there is not one group.
        """
        if not self.num_groups_wanted:
            return False
        if self.limits.max_num_gen_batches <= 0 or self._step.num_gen_batches < self.limits.max_num_gen_batches:
            return True
        if self.limits.on_exhausted == "raise" or not self._kept:
            message = self._exhausted()
            self._step.num_gen_batches = 0  # who starts the run again has as many again
            raise UserError(message)
        return False

    def open_gen_batch(self, prompts: Sequence[Prompt], replayed: Sequence[Sample | None] | None = None) -> None:
        """Take in the prompts of one gen batch, in the order in which they were drawn. replayed: per prompt the
        trajectory that its group borrows, if any."""
        assert not self._open, "the last gen batch is still open"
        assert prompts, "a gen batch has prompts"
        for prompt, sample in zip(prompts, replayed or [None] * len(prompts), strict=True):
            uid = f"{self._num_drawn:08d}-{prompt.index}"
            replayed_samples = (replace(sample, uid=uid, exp_mask=True),) if sample else ()
            self._open[uid] = Group(uid, prompt, replayed_samples)
            self._num_drawn += 1

    @property
    def finished(self) -> list[Group]:
        """Return the groups of the open gen batch that have their responses."""
        return list(self._finished.values())

    def forget_finished(self) -> None:
        """Have all groups of the open gen batch missing again."""
        self._finished = {}

    def missing(self) -> list[Group]:
        """Return the groups of the open gen batch that are still to be sampled, as they were drawn."""
        return [group for uid, group in self._open.items() if uid not in self._finished]

    def add_finished(self, group: Group) -> None:
        """Take in a group of the open gen batch with its responses."""
        assert group.uid in self._open, f"group {group.uid} was not asked for"
        assert group.uid not in self._finished, f"group {group.uid} came twice"
        self._finished[group.uid] = group

    def close_gen_batch(self) -> list[Group]:
        """Judge the groups of the open gen batch: kept ones, surplus included, wait in the order drawn. Returns all of
        them, in that order; those dropped are not held here any more."""
        assert not self.missing(), "a gen batch is judged when all its groups are there"
        judged = [self._finished[uid] for uid in self._open]
        for group in judged:
            self._step.generated.add(group)
            reason = self._filter_reason(group.samples)
            if reason is not None:
                self._step.filtered[reason] += 1
                self._step.num_filtered_samples += len(group.samples)
            if reason is None or self.limits.masks:
                self._kept.append(replace(group, keep=reason is None))
        self._step.num_gen_batches += 1
        self._open = {}
        self._finished = {}
        return judged

    def take(self) -> RolloutStep:
        """End the step and return it; of surplus groups those stay here that the next step may train on."""
        assert not self._open, "the gen batch is still open"
        step = self._step
        size = self.limits.train_batch_size
        step.groups = tuple(self._kept[:size])
        self._kept = self._kept[size:]
        self._discard_stale(self._weight_version + 1)
        self._open_step = None
        return step

    def state_dict(self) -> dict:
        """Return plain data (dicts, lists, tuples, numbers, strings), of an open step too."""
        return {
            "num_drawn": self._num_drawn,
            "kept": [group_to_plain(group) for group in self._kept],
            "open": [_drawn_to_plain(group) for group in self._open.values()],
            "finished": [group_to_plain(group) for group in self._finished.values()],
            "step": self._open_step and self._open_step.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where a saved queue stood."""
        self._num_drawn = state["num_drawn"]
        self._kept = [group_from_plain(plain) for plain in state["kept"]]
        self._open = {plain["uid"]: _drawn_from_plain(plain) for plain in state["open"]}
        self._finished = {plain["uid"]: group_from_plain(plain) for plain in state["finished"]}
        step = state.get("step")
        self._open_step = step and RolloutStep.from_state(step)

    def _discard_stale(self, weight_version: int) -> None:
        fresh = [group for group in self._kept if self._is_fresh(group, weight_version)]
        self._step.num_discarded += len(self._kept) - len(fresh)
        self._kept = fresh

    def _is_fresh(self, group: Group, weight_version: int) -> bool:
        """Return whether a step with these weights may train on the group."""
        return staleness(group, weight_version) <= self.limits.max_staleness

    def _exhausted(self) -> str:
        limits = self.limits
        step = self._step
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(step.filtered.items())) or "none dropped"
        return (
            f"{limits.section}.max_num_gen_batches = {limits.max_num_gen_batches} gen batches gave "
            f"{len(self._kept)} of the {limits.train_batch_size} groups that rollout step {step.number} needs "
            f"(dropped of {step.generated.num_groups} generated: {reasons}): change the data or the model so that the "
            "responses of a group differ, raise max_num_gen_batches or data.gen_batch_size, or set "
            "on_exhausted=train_partial (which needs at least one group)."
        )


def staleness(group: Group, weight_version: int) -> int:
    """Return the versions between the oldest token that was written for the group and weight_version. A replayed
    sample was not written for it."""
    new = (sample for sample in group.samples if not sample.exp_mask)
    versions = (version for sample in new for version in sample.weight_versions)
    return weight_version - min(versions, default=weight_version)


def _drawn_to_plain(group: Group) -> dict:
    """Return a group without responses of its own as plain data."""
    plain: dict = {"uid": group.uid, "prompt": prompt_to_plain(group.prompt)}
    if group.samples:
        plain["replayed"] = sample_to_plain(group.samples[0])
    return plain


def _drawn_from_plain(plain: dict) -> Group:
    replayed = (sample_from_plain(plain["replayed"]),) if "replayed" in plain else ()
    return Group(plain["uid"], prompt_from_plain(plain["prompt"]), replayed)
