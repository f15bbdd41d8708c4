"""Dynamic sampling: which groups carry no signal, and why."""

from collections.abc import Callable, Sequence


def _all_correct(correct: Sequence[bool]) -> str | None:
    return "all_correct" if all(correct) else None


def _all_incorrect(correct: Sequence[bool]) -> str | None:
    return None if any(correct) else "all_incorrect"


# filter_mode -> function of the raw correctness of a group's responses: the reason to drop it, or None to keep it.
# Raw correctness, not the shaped reward: there an all-wrong group of different lengths would pass.
FILTER_MODES: dict[str, Callable[[Sequence[bool]], str | None]] = {
    "strict": lambda correct: _all_correct(correct) or _all_incorrect(correct),
    "remove_all_correct": _all_correct,
    "remove_all_incorrect": _all_incorrect,
    "none": lambda correct: None,
}

# filter_groups.metric -> the field of a sample that a group must differ in. The names are verl's. There
# seq_final_reward also has the KL penalty subtracted, which is not known before the step is scored: without one it is
# seq_reward, and here it always is.
FILTER_METRICS: dict[str, str] = {
    "acc": "correct",  # by the verifier
    "score": "raw_reward",  # of the verifier, before shaping
    "seq_reward": "reward",  # after shaping: the sum of the response's token rewards
    "seq_final_reward": "reward",
}


def has_spread(values: Sequence[float]) -> bool:
    """Whether a group's metric tells its responses apart (its standard deviation is not 0). A group of one always
    passes, as in verl. Equality, not a computed deviation: that of equal numbers can differ from 0 by rounding."""
    return len(values) == 1 or any(value != values[0] for value in values)
