"""Running statistics of the samples of a rollout step, without keeping the samples.

Pure. Each metric is a row of a table.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_dapo.data.samples import Group, Sample

# metric -> a generated sample's part in the count
_COUNTS: dict[str, Callable[[Sample], int]] = {
    "dapo/num_truncated_samples": lambda sample: sample.is_truncated,
    "dapo/num_truncated_by_length": lambda sample: sample.is_truncated and sample.finish_reason == "length",
    "dapo/num_truncated_by_termination": lambda sample: sample.is_truncated and sample.finish_reason != "length",
    "reward/num_timeouts": lambda sample: _failed(sample, "timeout"),
    "reward/num_crashes": lambda sample: _failed(sample, "crash"),
    "reward/num_exceptions": lambda sample: _failed(sample, "exception"),
    "rollout/num_env_failures": lambda sample: _failed(sample, "environment") or _failed(sample, "agent"),
    # an environment's tokens cost no sampling
    "rollout/num_tokens": lambda sample: sample.num_written_tokens,
}
# metric -> a generated sample's value, for a mean; None leaves the sample out
_MEANS: dict[str, Callable[[Sample], float | None]] = {
    "dapo/truncation_ratio": lambda sample: sample.is_truncated,
    "dapo/avg_truncation_penalty_applied": lambda sample: (
        sample.raw_reward - sample.reward if sample.is_truncated else None
    ),
    "reward/mean": lambda sample: sample.reward,
    "reward/raw_mean": lambda sample: sample.raw_reward,
    "reward/accuracy": lambda sample: sample.correct,
    "reward/truncated_correct": lambda sample: sample.correct if sample.is_truncated else None,
    "response_length/mean": lambda sample: sample.num_response_tokens,
    "response_length/mean_square": lambda sample: sample.num_response_tokens**2,
    "rollout/num_turns_mean": lambda sample: sample.num_turns,
}
# the same of all samples of a group, replayed ones too
_MEANS_WITH_REPLAYED: dict[str, Callable[[Sample], float]] = {
    "prompt_length/mean": lambda sample: len(sample.prompt_tokens),  # as it was answered
}
# metric of a data source -> a generated sample's value, for a mean
_MEANS_BY_SOURCE: dict[str, Callable[[Sample], float]] = {
    "reward/SOURCE/mean": lambda sample: sample.reward,
    "reward/SOURCE/accuracy": lambda sample: sample.correct,
    "data/SOURCE/response_length": lambda sample: sample.num_response_tokens,
    "data/SOURCE/truncation_ratio": lambda sample: sample.is_truncated,
}
# of a source
_NUM_GROUPS, _NUM_FILTERED, _NUM_SAMPLES, _NUM_ERRORS = "num_groups", "num_filtered", "num", "num_errors"


class StepStatistics:
    """Statistics of ALL samples generated for a rollout step, also filtered ones.

    Replayed samples were not generated; only `num_samples` and `_MEANS_WITH_REPLAYED` count them.
    """

    def __init__(self) -> None:
        self.num_groups = 0
        self._sums: dict[str, float] = {}  # metric -> sum over the samples
        self._num_values: dict[str, int] = {}  # metric -> values in the sum, of means
        self._lengths: list[int] = []  # shortest and longest response
        # data source -> counts, and sums of _MEANS_BY_SOURCE
        self._sources: dict[str, dict[str, float]] = {}

    @property
    def num_samples(self) -> int:
        """Return the number of samples in all groups, replayed samples included."""
        return self._num_values.get("prompt_length/mean", 0)

    def add(self, group: Group, is_filtered: bool = False) -> None:
        """Count a finished group, kept or not. is_filtered: it has no signal."""
        self.num_groups += 1
        generated = [sample for sample in group.samples if not sample.exp_mask]
        for metric, count in _COUNTS.items():
            self._add_to_sum(metric, sum(map(count, generated)))
        self._add_values(_MEANS, generated)
        self._add_values(_MEANS_WITH_REPLAYED, group.samples)
        lengths = [*self._lengths, *(sample.num_response_tokens for sample in generated)]
        self._lengths = [min(lengths), max(lengths)] if lengths else []
        self._add_to_source(group.prompt.data_source or "unnamed", generated, is_filtered)

    def _add_to_source(self, source: str, generated: Sequence[Sample], is_filtered: bool) -> None:
        sums = self._sources.setdefault(source, {})
        new = {
            _NUM_GROUPS: 1,
            _NUM_FILTERED: is_filtered,
            _NUM_SAMPLES: len(generated),
            _NUM_ERRORS: sum(sample.reward_error is not None for sample in generated),
            **{metric: sum(map(value_of, generated)) for metric, value_of in _MEANS_BY_SOURCE.items()},
        }
        for name, value in new.items():
            sums[name] = sums.get(name, 0) + value

    def _of_sources(self) -> dict[str, float]:
        """Return the metrics of each data source, if there are several."""
        metrics: dict[str, float] = {}
        for source, sums in self._sources.items() if len(self._sources) > 1 else ():
            of_source = {
                "data/SOURCE/share": sums[_NUM_GROUPS] / self.num_groups,
                "data/SOURCE/filter_ratio": sums[_NUM_FILTERED] / sums[_NUM_GROUPS],
                "reward/SOURCE/num_errors": sums[_NUM_ERRORS],
            }
            if sums[_NUM_SAMPLES]:
                of_source |= {name: sums[name] / sums[_NUM_SAMPLES] for name in _MEANS_BY_SOURCE}
            metrics |= {name.replace("SOURCE", source): value for name, value in of_source.items()}
        return metrics

    def metrics(self) -> dict[str, float]:
        """Return the statistics by name; a mean over nothing is left out."""
        spread = dict(zip(("response_length/min", "response_length/max"), self._lengths, strict=False))
        counts = {metric: self._sums.get(metric, 0) for metric in _COUNTS}
        means = {metric: self._sums[metric] / number for metric, number in self._num_values.items()}
        return counts | means | spread | self._of_sources()

    def state_dict(self) -> dict:
        """Return plain data."""
        return {
            "num_groups": self.num_groups,
            "sums": dict(self._sums),
            "num_values": dict(self._num_values),
            "lengths": self._lengths,
            "sources": {source: dict(sums) for source, sums in self._sources.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from saved statistics."""
        self.num_groups = state["num_groups"]
        self._lengths = list(state["lengths"])
        self._sums = dict(state["sums"])
        self._num_values = dict(state["num_values"])
        self._sources = {source: dict(sums) for source, sums in state["sources"].items()}

    def _add_values(self, table: Mapping[str, Callable[[Sample], float | None]], samples: Sequence[Sample]) -> None:
        for metric, value_of in table.items():
            values = [value for value in map(value_of, samples) if value is not None]
            for value in values:
                self._add_to_sum(metric, value)
            if values:
                self._num_values[metric] = self._num_values.get(metric, 0) + len(values)

    def _add_to_sum(self, metric: str, value: float) -> None:
        self._sums[metric] = self._sums.get(metric, 0) + value


@dataclass
class RolloutStep:
    """One rollout step: counts of its batch's decisions, and its groups after `GroupQueue.take`."""

    number: int  # from 1
    num_gen_batches: float = 0.0  # prompts decided on, in gen batches
    num_ready: int | None = None  # waiting groups when the step was asked for; None before
    num_filtered_samples: int = 0  # dropped or masked
    num_discarded: int = 0  # groups too old now, or in the next step
    filtered: Counter[str] = field(default_factory=Counter)  # reason -> groups, dropped or masked
    # of all groups decided, kept or not
    generated: StepStatistics = field(default_factory=StepStatistics)
    dropped: StepStatistics = field(default_factory=StepStatistics)  # of those without a place in the step
    groups: tuple[Group, ...] = ()  # to train on, in the order of their prompts' draws

    def state_dict(self, with_kept: bool = True) -> dict:
        """Return plain data. The groups of a step being filled are the queue's.

        with_kept: False counts only dropped groups: the others are to be decided on again.
        """
        counts = {name: value for name, value in vars(self).items() if name != "groups"}
        counts |= {"filtered": dict(self.filtered), "dropped": self.dropped.state_dict()}
        if with_kept:
            return counts | {"generated": self.generated.state_dict()}
        if not self.dropped.num_groups:
            counts["filtered"] = {}  # they are masked, and kept
        return counts | {
            "num_ready": None,
            "num_filtered_samples": self.dropped.num_samples,
            "generated": counts["dropped"],
        }

    @classmethod
    def from_state(cls, state: dict) -> "RolloutStep":
        """Return the step described by `state_dict`."""
        statistics = {}
        for name in ("generated", "dropped"):
            statistics[name] = StepStatistics()
            if name in state:  # else of an earlier version
                statistics[name].load_state_dict(state[name])
        return cls(**{**state, "filtered": Counter(state["filtered"]), **statistics})


def _failed(sample: Sample, kind: str) -> bool:
    """Return whether the sample's reward failed in this way."""
    return (sample.reward_error or "").startswith(kind)
