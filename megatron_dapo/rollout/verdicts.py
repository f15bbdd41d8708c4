"""Checks for enough verdicts: a reward function that always fails looks like a bad policy."""

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.key_names import AGENT, MULTI_TURN
from megatron_dapo.config.schema.run import RewardConfig
from megatron_dapo.data.samples import Group, Sample

_SLOW_CURE = ", or give it more reward.timeout_s and load at import what takes long"
_SHOWN_CHARS = 200
# kind that is a key's alone -> the key
_OF_KEY = {"environment": f"{MULTI_TURN}.environment", "agent": AGENT}
_KINDS = ("exception", "timeout", "crash", *_OF_KEY)


class TooFewVerdicts(UserError):
    """The share of responses without a verdict is above `reward.max_error_share`, or 1."""


class VerdictCheck:
    """Counts of the responses of a step or an evaluation, and of those without a verdict."""

    def __init__(self, reward: RewardConfig, what: str) -> None:
        self._reward = reward
        self.what = what
        self.num_groups = 0
        self._num_samples = 0
        self._failures: Counter[str] = Counter()  # kind -> samples
        self._last_words = ""  # of the last failure with a text

    def count(self, samples: Sequence[Sample]) -> None:
        """Count samples, but not replayed ones: they were scored in another step."""
        self.count_errors(sample.reward_error for sample in samples if not sample.exp_mask)

    def count_errors(self, errors: Iterable[str | None]) -> None:
        """Count responses by the reason for a missing verdict; None for a given one."""
        for error in errors:
            self._num_samples += 1
            if error is not None:
                kind = next(kind for kind in _KINDS if error.startswith(kind))
                self._failures[kind] += 1
                self._last_words = error.partition(": ")[2] or self._last_words

    def after(self, groups: Sequence[Group]) -> "VerdictCheck":
        """Return a check that has counted these groups too."""
        other = copy(self)
        other._failures = Counter(self._failures)
        for group in groups:
            other.count(group.samples)
        other.num_groups += len(groups)
        return other

    def are_too_few(self) -> bool:
        """Return whether no response got a verdict, or too few did (`reward.max_error_share`)."""
        num_failed = self._failures.total()
        most = self._reward.max_error_share * self._num_samples
        return num_failed > 0 and (num_failed == self._num_samples or num_failed > most)

    def check_all_failed(self, last_traceback: str) -> None:
        """Raise TooFewVerdicts if no response got a verdict."""
        if self._failures.total() == self._num_samples:
            self.check(last_traceback)

    def check(self, last_traceback: str) -> None:
        """Raise TooFewVerdicts if there `are_too_few`."""
        if not self.are_too_few():
            return
        num_failed = self._failures.total()
        share = self._reward.max_error_share
        is_all = num_failed == self._num_samples
        bound = "all of them" if is_all else f"more than reward.max_error_share = {share:g} allows"
        kinds = ", ".join(f"{kind} {self._failures[kind]}" for kind in _KINDS if self._failures[kind])
        raise TooFewVerdicts(
            f"{self.what}: {num_failed} of {self._num_samples} responses got no verdict ({kinds}), {bound}; "
            f"correct {self._scorers()}, or what it needs"
            f"{_SLOW_CURE if self._failures['timeout'] else ''}"
            f"{f' (the last one: {self._last_words[:_SHOWN_CHARS]})' if self._last_words else ''}.",
            last_traceback,
        )

    def _scorers(self) -> str:
        """Return the config keys, with values, of the sources of verdicts."""
        if len(self._failures) == 1 and (key := _OF_KEY.get(next(iter(self._failures)))):
            return key
        reward = self._reward
        function = None if reward.function == "none" else reward.function
        keys = ("reward.function", "reward.model.path", "reward.judge.url")
        values = zip(keys, (function, reward.model.path, reward.judge.url), strict=True)
        return " or ".join(f"{key} {value}" for key, value in values if value)
