"""What the advantage estimators demand of the other keys."""

from collections.abc import Iterator

from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema import Config

ESTIMATOR = "algorithm.adv_estimator"
# key -> its default, and the estimators that read it
_READERS = {
    "gamma": (1.0, ("gae", "reinforce_plus_plus")),
    "lam": (1.0, ("gae",)),
    "norm_adv_by_std_in_grpo": (True, ("grpo",)),
}


def estimators(config: Config) -> Iterator[Mistake]:
    chosen = config.algorithm.adv_estimator
    for key, (default, readers) in _READERS.items():
        value = getattr(config.algorithm, key)
        if value != default and chosen not in readers:
            yield Mistake(
                (f"algorithm.{key}", ESTIMATOR),
                f"algorithm.{key} is {str(value).lower()}, but has no effect while {ESTIMATOR} is {chosen}; remove it, "
                f"or set {ESTIMATOR} to {' or '.join(readers)}.",
            )
    if chosen == "rloo" and config.actor_rollout_ref.rollout.n == 1:
        yield Mistake(
            (ESTIMATOR, "actor_rollout_ref.rollout.n"),
            f"{ESTIMATOR} is rloo, which compares a response with the others of its group, but "
            f"actor_rollout_ref.rollout.n is 1; set n to 2 or more, or {ESTIMATOR} to reinforce_plus_plus.",
        )
