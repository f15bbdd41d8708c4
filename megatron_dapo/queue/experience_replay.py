"""Experience replay (ExGRPO, arXiv 2510.02245): groups borrow correct earlier trajectories.

Pure: no servers, no clock, no files. Not to be confused with `trainer.replay` (batch_replay.py),
which trains on the dumped batches of a run again; they may hold samples replayed by this module.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dapo.config.derived import uses_experience_replay
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.exp_manager import ExperienceReplayConfig
from megatron_dapo.data.samples import Group, Sample
from megatron_dapo.queue.plain_data import sample_from_plain, sample_to_plain


@dataclass(frozen=True)
class RecordedGroup:
    """A generated group, kept by the pool until its step ends."""

    prompt: int  # its index
    num_right: int  # right responses
    is_solved: bool  # all responses were right
    experiences: tuple[Sample, ...]  # right responses for replay; none if it is solved

    @classmethod
    def of(cls, group: Group) -> "RecordedGroup":
        """Return the record of a finished group."""
        num_right = sum(sample.correct for sample in group.samples)
        if num_right == len(group.samples):
            return cls(group.prompt.index, num_right, True, ())
        right = (
            sample for sample in group.samples if sample.correct and not sample.exp_mask and sample.loss_mask.any()
        )
        return cls(group.prompt.index, num_right, False, tuple(right))

    def to_plain(self) -> dict:
        """Return plain data."""
        return {**vars(self), "experiences": [sample_to_plain(sample) for sample in self.experiences]}

    @classmethod
    def from_plain(cls, plain: dict) -> "RecordedGroup":
        """Return the record of `to_plain`."""
        return cls(**{**plain, "experiences": tuple(sample_from_plain(sample) for sample in plain["experiences"])})


def mean_entropy(sample: Sample) -> float:
    """Return the mean of -log-prob over the tokens of the model, as sampled."""
    own = sample.rollout_log_probs[sample.loss_mask != 0]
    return -float(own.mean(dtype=np.float64))


class ExperiencePool:
    """Experiences by prompt: correct trajectories with log-probs and weight versions.

    Both are of the trajectory's server. A prompt is retired for good once all responses of one of
    its groups were right. At a bound the oldest experience leaves first. Draws depend only on the
    seed and the recorded groups.
    """

    def __init__(self, keys: ExperienceReplayConfig, group_size: int, seed: int) -> None:
        """Begin with an empty pool. group_size: responses per prompt, the replayed one included."""
        self._keys = keys
        self._group_size = group_size
        self._seed = seed
        self._begun = False
        self._num_draws = 0
        self._num_recorded = 0
        self._num_tokens = 0
        self._experiences: dict[int, Sample] = {}  # by number, in the order recorded
        self._prompt_of: dict[int, int] = {}  # number of an experience -> its prompt
        # number of an experience -> its mean entropy, once it was asked for
        self._entropy_of: dict[int, float] = {}
        # prompt -> numbers of its experiences, in the order recorded
        self._of_prompt: dict[int, list[int]] = {}
        self._num_right: dict[int, int] = {}  # prompt in the pool -> successes in its last group
        self._retired: set[int] = set()
        self._drawn: set[int] = set()  # prompts, in the step under way
        self._num_fresh = 0  # samples, in the step under way
        self._num_fresh_right = 0
        self._recorded: list[RecordedGroup] = []  # of the step under way

    def record(self, groups: Sequence[Group]) -> None:
        """Take in groups of the step under way; nothing of them is drawn before it ends.

        Only fresh samples decide whether replay begins; replayed ones count as successes of their
        group.
        """
        fresh = [sample for group in groups for sample in group.samples if not sample.exp_mask]
        self._num_fresh += len(fresh)
        self._num_fresh_right += sum(sample.correct for sample in fresh)
        self._recorded += [RecordedGroup.of(group) for group in groups]

    def end_step(self, dealt_later: Collection[int] = ()) -> None:
        """Take the step's recorded groups into the pool, for the next step.

        dealt_later: drawn prompts of the next step's groups; it does not draw them again.
        """
        if self._num_fresh and self._num_fresh_right >= self._keys.replay_start_ratio * self._num_fresh:
            self._begun = True
        for recorded in self._recorded:
            self._take_in(recorded)
        while self._num_tokens > self._keys.max_pool_tokens:
            self._remove(next(iter(self._experiences)))
        self.forget_step(dealt_later)

    def forget_step(self, dealt_later: Collection[int] = ()) -> None:
        """Forget the records and draws of the step under way; it begins anew with earlier draws."""
        self._num_fresh = 0
        self._num_fresh_right = 0
        self._recorded = []
        self._drawn = set(dealt_later)

    def is_retired(self, prompt: int) -> bool:
        """Return whether the prompt is retired."""
        return prompt in self._retired

    def draw(self, gen_batch_size: int) -> list[tuple[int, Sample]]:
        """Return (prompt, experience) for each prompt to be replayed in the next gen batch.

        None before replay begins; fewer than `exp_ratio` from a small pool. No prompt comes twice
        in a step, ended by `end_step`: else a small pool would fill a step with the same
        trajectories.

        First a bucket of prompts with k successes is chosen. Its weight is the density at k of a
        normal distribution around half the group size with deviation 1. Then comes a prompt of it,
        uniformly, then the prompt's experience of least entropy.
        """
        if not self._begun:
            return []
        draw = random.Random(f"{self._seed}:{self._num_draws}")
        buckets = self._buckets()
        self._num_draws += 1
        chosen: list[int] = []
        # 0.29 * 100 is 28.999...
        num_replayed = math.floor(self._keys.exp_ratio * gen_batch_size + 1e-9)
        while buckets and len(chosen) < num_replayed:
            (num_right,) = draw.choices(list(buckets), self._weights(buckets))
            prompts = buckets[num_right]
            chosen.append(prompts.pop(draw.randrange(len(prompts))))
            if not prompts:
                del buckets[num_right]
        self._drawn.update(chosen)
        return [(prompt, self._least_entropy(prompt)) for prompt in chosen]

    def metrics(self) -> dict[str, float]:
        """Return the sizes of the pool."""
        return {
            "replay/num_prompts": len(self._of_prompt),
            "replay/num_trajectories": len(self._experiences),
            "replay/num_tokens": self._num_tokens,
            "replay/num_retired": len(self._retired),
        }

    def state_dict(self) -> dict:
        """Return plain data."""
        experiences = [
            {"number": number, "prompt": self._prompt_of[number], "sample": sample_to_plain(sample)}
            for number, sample in self._experiences.items()
        ]
        return {
            "begun": self._begun,
            "num_draws": self._num_draws,
            "num_recorded": self._num_recorded,
            "experiences": experiences,
            "num_right": [list(pair) for pair in sorted(self._num_right.items())],
            "retired": sorted(self._retired),
            "drawn": sorted(self._drawn),
            "num_fresh": [self._num_fresh, self._num_fresh_right],
            "outcomes": [recorded.to_plain() for recorded in self._recorded],
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved pool."""
        self._begun = state["begun"]
        self._num_draws = state["num_draws"]
        self._num_tokens = 0
        for numbered in (self._experiences, self._prompt_of, self._entropy_of, self._of_prompt):
            numbered.clear()
        for plain in state["experiences"]:
            self._put(plain["number"], plain["prompt"], sample_from_plain(plain["sample"]))
        self._num_recorded = state["num_recorded"]
        self._num_right = {prompt: num_right for prompt, num_right in state["num_right"]}
        self._retired = set(state["retired"])
        self._drawn = set(state["drawn"])
        self._num_fresh, self._num_fresh_right = state["num_fresh"]
        self._recorded = [RecordedGroup.from_plain(plain) for plain in state["outcomes"]]

    def _take_in(self, group: RecordedGroup) -> None:
        prompt = group.prompt
        if prompt in self._retired:
            return
        if group.is_solved:
            self._retired.add(prompt)
            for number in list(self._of_prompt.get(prompt, ())):
                self._remove(number)
            return
        for sample in group.experiences:
            self._put(self._num_recorded, prompt, sample)
            self._num_recorded += 1
        if prompt in self._of_prompt:
            self._num_right[prompt] = group.num_right

    def _put(self, number: int, prompt: int, sample: Sample) -> None:
        numbers = self._of_prompt.setdefault(prompt, [])
        numbers.append(number)
        self._experiences[number] = sample
        self._prompt_of[number] = prompt
        self._num_tokens += sample.num_tokens
        if len(numbers) > self._keys.max_trajectories_per_task:
            self._remove(numbers[0])

    def _remove(self, number: int) -> None:
        prompt = self._prompt_of.pop(number)
        self._entropy_of.pop(number, None)
        self._num_tokens -= self._experiences.pop(number).num_tokens
        numbers = self._of_prompt[prompt]
        numbers.remove(number)
        if not numbers:
            del self._of_prompt[prompt]
            self._num_right.pop(prompt, None)

    def _buckets(self) -> dict[int, list[int]]:
        """Return successes -> prompts to draw from, both in an order kept by a loaded pool."""
        buckets: dict[int, list[int]] = {}
        for prompt, num_right in sorted(self._num_right.items()):
            if prompt not in self._drawn:
                buckets.setdefault(num_right, []).append(prompt)
        return dict(sorted(buckets.items()))

    def _weights(self, buckets: Mapping[int, Sequence[int]]) -> list[float]:
        """Return densities relative to the best bucket's: all may underflow in large groups."""
        squares = [(num_right - self._group_size / 2) ** 2 for num_right in buckets]
        return [math.exp((min(squares) - square) / 2) for square in squares]

    def _least_entropy(self, prompt: int) -> Sample:
        return self._experiences[min(self._of_prompt[prompt], key=self._entropy)]

    def _entropy(self, number: int) -> float:
        if number not in self._entropy_of:
            self._entropy_of[number] = mean_entropy(self._experiences[number])
        return self._entropy_of[number]


def make_pool(config: Config) -> ExperiencePool | None:
    """Return the run's pool; None without experience replay."""
    if not uses_experience_replay(config):
        return None
    return ExperiencePool(config.exp_manager.experience_replay, config.actor_rollout_ref.rollout.n, config.data.seed)


def replay_metrics(groups: Sequence[Group], weight_version: int) -> dict[str, float]:
    """Return the number of groups with a replayed sample, and these samples' mean age.

    The age is in weight versions.
    """
    samples = [sample for group in groups for sample in group.samples if sample.exp_mask]
    ages = [weight_version - int(sample.weight_versions.min()) for sample in samples]
    mean = {"replay/age_mean": sum(ages) / len(ages)} if ages else {}
    return {"replay/num_replayed_groups": len(ages), **mean}
