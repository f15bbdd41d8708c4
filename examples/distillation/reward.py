"""The reward of distillation only: 0 for any response. Correctness is logged, but not trained
on."""

from examples.arithmetic.reward import is_right


def score(data_source: str, response: str, ground_truth: str, extra_info: dict) -> dict[str, float]:
    """Return a score of 0, so that every advantage is 0, and whether the sum is right as `acc`."""
    return {"score": 0.0, "acc": float(is_right(response, ground_truth))}
