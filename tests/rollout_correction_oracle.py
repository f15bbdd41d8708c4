"""A rollout correction by plain arithmetic in float64, sequence by sequence, and cases to compare.

Written with loops over lists, unlike the masks and segment sums of the code under test.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dapo.algorithms.metrics import finalize
from megatron_dapo.algorithms.rollout_correction import Corrected, RatioBounds, RolloutCorrection, rollout_correction


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of `rollout_correction`."""

    old: Tensor
    rollout: Tensor
    mask: Tensor
    segments: Tensor
    num_segments: int
    config: RolloutCorrection

    def corrected(self, function: Callable[..., Corrected] = rollout_correction) -> Corrected:
        return function(self.old, self.rollout, self.mask, self.segments, self.num_segments, self.config)


def expected(case: Case) -> tuple[list[float], dict[str, float]]:
    """(importance of each token, the metrics' means)."""
    rows = zip(*(x.flatten().tolist() for x in (case.old, case.rollout, case.mask, case.segments)), strict=True)
    members: dict[int, dict[int, float]] = {}  # segment -> {place: d} of the counted tokens
    num_tokens = 0
    for place, (old, mu, mask, segment) in enumerate(rows):
        num_tokens += 1
        if mask:
            members.setdefault(segment, {})[place] = min(20.0, max(-20.0, old - mu))
    importance = [1.0] * num_tokens
    weights, outside, num_rejected, num_gone = [], 0, 0, 0
    for differences in members.values():
        kept = kept_places(differences, case.config)
        num_rejected += len(differences) - len(kept)
        num_gone += not kept
        for place, d in differences.items():
            weight, is_outside = weight_of(d, list(differences.values()), case.config)
            weights.append(weight)
            outside += is_outside
            importance[place] = weight if place in kept else 0.0
    return importance, metrics_of(case.config, weights, outside, num_rejected, num_gone, len(members))


def metrics_of(config, weights, outside, num_rejected, num_gone, num_sequences) -> dict[str, float]:
    shown = {}
    if weights and config.rollout_is != "none":
        shown["actor/rollout_is_mean"] = math.fsum(weights) / len(weights)
        shown["actor/rollout_is_truncated"] = outside / len(weights)
    if weights and (config.rollout_rs != "none" or config.token_veto is not None):
        shown["actor/rollout_rs_token_masked"] = num_rejected / len(weights)
        shown["actor/rollout_rs_seq_masked"] = num_gone / num_sequences
    return shown


def weight_of(d: float, of_sequence: list[float], config: RolloutCorrection) -> tuple[float, bool]:
    """The weight of a token, and whether its ratio is out of bounds."""
    if config.rollout_is == "none":
        return 1.0, False
    if config.rollout_is == "sequence":
        d = min(20.0, max(-20.0, math.fsum(of_sequence)))
    ratio, (low, high) = math.exp(d), config.rollout_is_bounds
    if low is not None and ratio < low:
        return 0.0, True
    if ratio > high:
        return (high if low is None else 0.0), True
    return ratio, False


def kept_places(differences: dict[int, float], config: RolloutCorrection) -> set[int]:
    ds = list(differences.values())
    if config.token_veto is not None and min(map(math.exp, ds)) < config.token_veto:
        return set()
    low, high = config.rollout_rs_bounds
    low = -math.inf if low is None else low
    if config.rollout_rs == "token_k1":
        return {place for place, d in differences.items() if low <= math.exp(d) <= high}
    looked_at = {
        "none": lambda: high,
        "seq_mean_k1": lambda: math.exp(math.fsum(ds) / len(ds)),
        "seq_mean_k3": lambda: math.fsum(math.expm1(d) - d for d in ds) / len(ds),
    }[config.rollout_rs]()
    return set(differences) if low <= looked_at <= high else set()


def check(answer: Corrected, case: Case) -> None:
    """Asserts that an answer is right."""
    importance, shown = expected(case)
    assert answer.importance.dtype == case.old.dtype and answer.importance.shape == case.old.shape
    assert not answer.importance.requires_grad
    for place, (ours, wanted) in enumerate(zip(answer.importance.flatten().tolist(), importance, strict=True)):
        assert abs(ours - wanted) <= 1e-12 * wanted, f"importance {place}: {ours} is not {wanted}"
    ours = finalize(answer.sums)
    assert ours.keys() == shown.keys()
    for name, value in shown.items():
        assert abs(ours[name] - value) <= 1e-12 * value, f"{name}: {ours[name]} is not {value}"


def random_case(
    config: RolloutCorrection, spread: float = 0.4, seed: int = 0, shape: tuple[int, ...] = (1, 96)
) -> Case:
    """Sequences of different lengths, one of them without counted tokens;
    NaN at all uncounted tokens."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(shape, generator=rng, dtype=torch.float64) * 3
    difference = spread * torch.randn(shape, generator=rng, dtype=torch.float64)
    mask = (torch.rand(shape, generator=rng) < 0.7).float()
    segments = (torch.arange(old.numel()) // 13).view(shape)
    mask[segments == 2] = 0
    hide = lambda x: torch.where(mask == 0, torch.nan, x)  # noqa: E731
    return Case(hide(old), hide(old - difference), mask, segments, int(segments.max()) + 1, config)


def by_hand(config: RolloutCorrection, sequences: list[list[float]]) -> Case:
    """Of sequences of differences, every token counted."""
    rollout = -torch.tensor([d for row in sequences for d in row], dtype=torch.float64)
    segments = torch.tensor([i for i, row in enumerate(sequences) for _ in row])
    return Case(torch.zeros_like(rollout), rollout, torch.ones_like(rollout), segments, len(sequences), config)


def config(**changes) -> RolloutCorrection:
    pairs = {name: RatioBounds(*value) if name.endswith("bounds") else value for name, value in changes.items()}
    return RolloutCorrection(**pairs)


TOKEN = config(rollout_is="token", rollout_is_bounds=(None, 1.3))
CASES: dict[str, Callable[[], Case]] = {
    "nothing": functools.partial(random_case, config()),
    "truncated": functools.partial(random_case, TOKEN, seed=1),
    "truncated, of sequences": functools.partial(
        random_case, config(rollout_is="sequence", rollout_is_bounds=(None, 1.7)), seed=2
    ),
    "icepop": functools.partial(random_case, config(rollout_is="token", rollout_is_bounds=(0.8, 1.5)), seed=3),
    "icepop, of sequences": functools.partial(
        random_case, config(rollout_is="sequence", rollout_is_bounds=(0.6, 2.0)), seed=4
    ),
    "tokens rejected": functools.partial(
        random_case, config(rollout_rs="token_k1", rollout_rs_bounds=(0.7, 1.4)), seed=5
    ),
    "sequences rejected by their geometric mean": functools.partial(
        random_case, config(rollout_rs="seq_mean_k1", rollout_rs_bounds=(0.95, 1.1)), seed=6
    ),
    "sequences rejected by k3": functools.partial(
        random_case, config(rollout_rs="seq_mean_k3", rollout_rs_bounds=(None, 0.07)), seed=7
    ),
    "veto": functools.partial(random_case, config(token_veto=0.45), seed=8),
    "everything": functools.partial(
        random_case,
        config(
            rollout_is="token",
            rollout_is_bounds=(None, 1.2),
            rollout_rs="seq_mean_k1",
            rollout_rs_bounds=(0.9, 1.15),
            token_veto=0.4,
        ),
        seed=9,
    ),
    "rows of a rectangle": functools.partial(
        random_case,
        config(rollout_is="sequence", rollout_rs="token_k1", rollout_rs_bounds=(0.7, 1.4)),
        seed=10,
        shape=(8, 13),
    ),
    "beyond the clamps": lambda: by_hand(
        config(rollout_is="token", rollout_is_bounds=(None, 1e12)), [[30.0, -30.0, 20.0], [19.0]]
    ),
    "beyond the clamps in sum": lambda: by_hand(
        config(rollout_is="sequence", rollout_is_bounds=(None, 1e12)), [[15.0, 9.0], [-15.0, -9.0], [30.0, -4.0]]
    ),
    "exactly at the bounds": lambda: by_hand(
        config(rollout_is="token", rollout_is_bounds=(1.0, 1.0), rollout_rs="token_k1", rollout_rs_bounds=(1.0, 1.0)),
        [[0.0, 0.1, -0.1]],
    ),
    "a truncated weight of exactly the cap": lambda: by_hand(
        config(rollout_is="token", rollout_is_bounds=(None, 1.0)), [[0.0]]
    ),
    "sequences exactly at the bounds": lambda: by_hand(
        config(rollout_rs="seq_mean_k3", rollout_rs_bounds=(None, 0.0)), [[0.0, 0.0], [0.0, 1e-3]]
    ),
    "a veto of exactly the ratio": lambda: by_hand(config(token_veto=1.0), [[0.0, 0.5], [0.0, -1e-9]]),
    "responses of one token": lambda: by_hand(
        config(rollout_rs="token_k1", rollout_rs_bounds=(0.9, 1.2)), [[0.3], [0.1], [0.0, -0.5]]
    ),
    "no token counts": lambda: none_counts(TOKEN),
    "tiny differences": functools.partial(
        random_case, config(rollout_rs="seq_mean_k3", rollout_rs_bounds=(None, 5e-13)), spread=1e-6, seed=11
    ),
}


def none_counts(correction: RolloutCorrection) -> Case:
    case = random_case(correction)
    return Case(case.old, case.rollout, torch.zeros_like(case.mask), case.segments, case.num_segments, correction)
