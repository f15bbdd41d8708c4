"""The loss of a batch of tokens by plain arithmetic in float64, token by token,
and cases to compare.

Written with branches, unlike the maxima and masks of the code under test:
no formula is on both sides.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from unittest import mock

import torch
from torch import Tensor

from megatron_dapo.algorithms.aggregation import AGGREGATIONS, token_weights
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, metric_names
from megatron_dapo.algorithms.policy_loss import Clip, LossSums, OffPolicy

# of a term: the log-ratio (up to 20) is rounded before exp, which is then squared
FLOAT32 = 32 * 2.0**-23
FLOAT64 = 1e-12


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of `token_loss`."""

    log_probs: Tensor
    entropy: Tensor | None
    tokens: TokenBatch
    config: LossConfig
    kl: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Case":
        """The same numbers in another precision."""
        cast = lambda x: x.to(dtype) if x is not None and x.is_floating_point() else x  # noqa: E731
        tokens = TokenBatch(**{field.name: cast(getattr(self.tokens, field.name)) for field in fields(TokenBatch)})
        return Case(cast(self.log_probs), cast(self.entropy), tokens, self.config, cast(self.kl))


# ---------------------------------------------------------------------------------- the oracle


def clamp(x: float, bound: float) -> float:
    return max(-bound, min(bound, x))


def clipped(adv: float, ratio: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """Loss, and its derivative by the log of the ratio."""
    if adv > 0 and ratio > 1 + high:
        return -adv * (1 + high), 0.0
    if adv < 0 and ratio < 1 - low:
        return -adv * (1 - low), 0.0
    if adv < 0 and dual is not None and ratio > dual:
        return -adv * dual, 0.0
    return -adv * ratio, -adv * ratio


def gated(adv: float, ratio: float, clip: Clip) -> tuple[float, float]:
    """SAPO: 4 / tau * sigmoid(tau * (r - 1)) in place of r. And its derivative by the log of r."""
    tau = clip.tau_pos if adv > 0 else clip.tau_neg
    e = math.exp(-tau * (ratio - 1))
    return -adv * 4 / tau / (1 + e), -adv * 4 * ratio * e / (1 + e) ** 2


def far(lp: float, old: float, config: LossConfig) -> bool:
    """DPPO: whether the choice "this token, or any other" diverges too much from the old policy's."""
    pairs = [(math.exp(old), math.exp(lp))]
    pairs.append(tuple(max(1 - chance, 1e-8) for chance in pairs[0]))
    if config.policy_loss == "dppo_tv":
        return abs(pairs[0][0] - pairs[0][1]) > config.clip.divergence
    return sum(q * math.log(q / p) for q, p in pairs) > config.clip.divergence


def cut(adv: float, ratio: float, lp: float, old: float, config: LossConfig) -> tuple[bool, bool]:
    """Whether a new token is cut above, and below."""
    if config.policy_loss == "sapo":
        return False, False
    if config.policy_loss in ("dppo_tv", "dppo_kl"):
        is_far = far(lp, old, config)
        return is_far and adv > 0 and lp > old, is_far and adv < 0 and lp < old
    always = config.policy_loss == "cispo"
    return (adv > 0 or always) and ratio > 1 + config.clip.high, (adv < 0 or always) and ratio < 1 - config.clip.low


def policy(
    adv: float, log_ratio: float, lp: float, old: float, replayed: bool, config: LossConfig
) -> tuple[float, float]:
    """Loss, and its derivative by the log-prob: of the clipped kinds by way
    of the clamped ratio."""
    clip = config.clip
    ratio = math.exp(clamp(log_ratio, 20.0))
    if config.policy_loss == "cispo" and not replayed:
        weight = ratio
        if ratio > 1 + clip.high:
            weight = 1 + clip.high
        elif ratio < 1 - clip.low:
            weight = 1 - clip.low
        return -weight * adv * lp, -weight * adv
    if config.policy_loss == "sapo" and not replayed:
        loss, slope = gated(adv, ratio, clip)
    elif config.policy_loss in ("dppo_tv", "dppo_kl") and not replayed:
        loss = 0.0 if any(cut(adv, ratio, lp, old, config)) else -adv * ratio
        slope = loss
    else:
        loss, slope = by_ratio(adv, ratio, replayed, config)
    return loss, 0.0 if abs(log_ratio) > 20 else slope


def by_ratio(adv: float, ratio: float, replayed: bool, config: LossConfig) -> tuple[float, float]:
    """Loss, and its derivative by the log of the ratio."""
    clip, off = config.clip, config.off_policy
    if replayed and off.mode == "exgrpo_policy_shaping":
        return -adv * ratio / (ratio + off.beta), -adv * ratio * off.beta / (ratio + off.beta) ** 2
    high = off.clip_high if replayed and off.clip_high is not None else clip.high
    return clipped(adv, ratio, clip.low, high, clip.dual)


def kl_of(kind: str, lp: float, ref: float) -> tuple[float, float]:
    """Estimator, and its derivative by lp."""
    k1 = lp - ref
    if kind == "low_var_kl":
        x = clamp(-k1, 20.0)
        k3 = math.expm1(x) - x
        return min(k3, 10.0), 0.0 if abs(k1) > 20 or k3 > 10 else -math.expm1(x)
    return {"kl": (k1, 1.0), "abs": (abs(k1), (k1 > 0) - (k1 < 0)), "mse": (k1 * k1 / 2, k1)}[kind]


def one_token(t: dict[str, float], config: LossConfig) -> tuple[dict, dict, tuple[float, float], float]:
    """Of a counted token: {sum's name: (term, its count)}, {maximum's name: value}, the two parts
    of the gradient by the log-prob, the gradient by the entropy. The batch's count is added by the
    caller: such rows count 0 here."""
    w, lp, adv = t["weights"], t["log_probs"], t["advantages"]
    old = t.get("old_log_probs", lp)
    log_ratio = t["sequence_log_ratio"] if config.policy_loss == "gspo" else lp - old
    ratio = math.exp(clamp(log_ratio, 20.0))
    replayed = config.off_policy is not None and bool(t.get("exp_mask", 0))
    loss, slope = policy(adv, log_ratio, lp, old, replayed, config)
    on, sums = 0 if replayed else 1, {}
    if config.rollout_is_threshold is not None:
        server_ratio = math.exp(clamp(old - t["rollout_log_probs"], 20.0))
        lowest = config.rollout_is_threshold_lower
        is_outside = server_ratio > config.rollout_is_threshold or (lowest is not None and server_ratio < lowest)
        importance = server_ratio
        if is_outside:
            importance = config.rollout_is_threshold if lowest is None else 0.0
        loss, slope = loss * importance, slope * importance
        sums["actor/rollout_is_mean"] = (importance, 1)
        sums["actor/rollout_is_truncated"] = (float(is_outside), 1)
    if "importance" in t:
        loss, slope = loss * t["importance"], slope * t["importance"]
    sums["actor/pg_loss"] = (w * loss, 0)
    sums["actor/on_pg_loss"] = (on * w * loss, 0 if config.off_policy is None else on * w)
    if config.off_policy is not None:
        sums["actor/off_pg_loss"] = ((1 - on) * w * loss, (1 - on) * w)
        sums["exp_mask_ratio"] = (1 - on, 1)
    clip, clips = config.clip, config.policy_loss in ("dapo", "gspo")
    too_bad = clips and adv < 0 and clip.dual is not None and ratio > clip.dual
    above, below = cut(adv, ratio, lp, old, config)
    sums["actor/on_pg_clipfrac"] = (on * above, on)
    sums["actor/on_pg_clipfrac_lower"] = (on * below, on)
    sums["actor/dual_clipfrac"] = (on * too_bad, on)
    sums["actor/ppo_kl"] = (-clamp(lp - old, 20.0), 1)
    sums["actor/ratio_mean"] = (ratio, 1)
    sums["actor/entropy_sampled"] = (-lp, 1)
    total, parts = w * loss, [w * slope, 0.0]
    if config.report_entropy:
        sums["actor/entropy"] = (t["entropy"], 1)
        total -= config.entropy_coef * w * t["entropy"]
    if config.use_kl_loss:
        full = config.kl_loss_type == "full"
        kl, kl_slope = (t["kl"], 0.0) if full else kl_of(config.kl_loss_type, lp, t["ref_log_probs"])
        sums["actor/kl_loss"] = (w * kl, 0)
        total, parts[1] = total + config.kl_loss_coef * w * kl, config.kl_loss_coef * w * kl_slope
    sums["actor/loss"] = (total, 0)
    maxima = {"actor/ratio_max": ratio}
    if config.report_mismatch:
        one, d = t.get("is_current", 1), (lp if config.bypass_mode else old) - t["rollout_log_probs"]
        x = clamp(d, 20.0)
        terms = (-d, math.expm1(x) - x, abs(d), math.exp(x), math.exp(2 * x))
        names = "actor/rollout_kl actor/rollout_k3 actor/rollout_abs_diff _rollout_weight _rollout_weight_squared"
        sums |= {name: (one * term, one) for name, term in zip(names.split(), terms, strict=True)}
        if config.report_stale:
            older = t.get("is_stale", 0)
            for name in ("actor/rollout_kl", "actor/rollout_k3", "_rollout_weight", "_rollout_weight_squared"):
                sums[f"{name}_stale"] = (older * terms[names.split().index(name)], older)
            for name in ("_rollout_weight", "_rollout_weight_squared"):
                sums[f"{name}_all"] = ((one + older) * terms[names.split().index(name)], one + older)
        maxima["actor/rollout_abs_diff_max"] = one * abs(d)
    return sums, maxima, tuple(parts), -config.entropy_coef * w


@dataclass(frozen=True, eq=False)
class Expected:
    """sums: name -> (sum, count, sum of absolute terms).
    grads: per token (gradient, sum of its absolute parts)."""

    sums: dict[str, list[float]]
    maxima: dict[str, float]
    grads: list[tuple[float, float]]
    entropy_grads: list[float]


def expected(case: Case) -> Expected:
    """Adds the tokens up."""
    columns = {"log_probs": case.log_probs, "entropy": case.entropy, "kl": case.kl, **vars(case.tokens)}
    columns = {name: x.tolist() for name, x in columns.items() if x is not None and name != "count"}
    sum_names, max_names = metric_names(case.config)
    sums, maxima = {name: [0.0, 0.0, 0.0] for name in sum_names}, dict.fromkeys(max_names, 0.0)
    grads, entropy_grads, count = [], [], float(case.tokens.count)
    for i, weight in enumerate(columns["weights"]):
        if weight == 0:
            grads.append((0.0, 0.0))
            entropy_grads.append(0.0)
            continue
        terms, highest, parts, entropy_grad = one_token({k: v[i] for k, v in columns.items()}, case.config)
        assert terms.keys() == sums.keys() and highest.keys() == maxima.keys()
        for name, (term, counts) in terms.items():
            sums[name] = [a + b for a, b in zip(sums[name], (term, counts, abs(term)), strict=True)]
        maxima = {name: max(value, highest[name]) for name, value in maxima.items()}
        grads.append((sum(parts), sum(map(abs, parts))))
        entropy_grads.append(entropy_grad)
    per_batch = {"actor/loss", "actor/pg_loss", "actor/kl_loss"} & sums.keys()
    for name in per_batch | ({"actor/on_pg_loss"} if case.config.off_policy is None else set()):
        sums[name][1] = count
    return Expected(sums, maxima, grads, entropy_grads)


def check(result, case: Case, want: Expected, precision: float, floor: float = 0.0) -> None:
    """Asserts that a TokenLoss is right, to `precision` times the absolute terms
    of each sum plus `floor`."""

    def close(ours: float, value: float, scale: float, what: str) -> None:
        assert abs(ours - value) <= precision * (abs(scale) + floor), f"{what}: {ours} is not {value}"

    close(float(result.loss_sum), *(want.sums["actor/loss"][i] for i in (0, 2)), "loss_sum")
    assert result.sums.shape == (len(want.sums), 2) and result.sums.dtype == torch.float64
    for (name, (total, count, absolute)), ours in zip(want.sums.items(), result.sums.tolist(), strict=True):
        close(ours[0], total, absolute, name)
        close(ours[1], count, count, f"count of {name}")
    assert result.maxima.shape == (len(want.maxima),) and result.maxima.dtype == torch.float64
    for (name, value), ours in zip(want.maxima.items(), result.maxima.tolist(), strict=True):
        close(ours, value, value, name)
    for i, ((value, absolute), ours) in enumerate(zip(want.grads, result.grad_log_probs.tolist(), strict=True)):
        close(ours, value, absolute, f"gradient of log-prob {i}")
    if case.config.report_entropy and case.config.entropy_coef:
        for i, (value, ours) in enumerate(zip(want.entropy_grads, result.grad_entropy.tolist(), strict=True)):
            close(ours, value, value, f"gradient of entropy {i}")
    else:
        assert result.grad_entropy is None
    if case.kl is None:
        assert result.grad_kl is None
    else:
        for i, (w, ours) in enumerate(zip(case.tokens.weights.tolist(), result.grad_kl.tolist(), strict=True)):
            close(ours, case.config.kl_loss_coef * w, w, f"gradient of KL {i}")


@contextlib.contextmanager
def declaring(change: Callable[[LossSums], LossSums]) -> Iterator[None]:
    """With the policy loss's metrics, as changed by `change`."""
    # the package exports the function of that name
    module = sys.modules["megatron_dapo.algorithms.dapo_loss"]
    original = module.policy_loss
    metric_names.cache_clear()
    with mock.patch.object(module, "policy_loss", lambda *args, **kwargs: change(original(*args, **kwargs))):
        yield
    metric_names.cache_clear()


# ---------------------------------------------------------------------------------- cases


def random_case(config: LossConfig, n: int = 300, mode: str = "token-mean", seed: int = 0, **changes) -> Case:
    """Log-ratios wide enough for every branch of a clip; NaN wherever a token does not count."""
    rng = torch.Generator().manual_seed(seed)
    normal, uniform = (functools.partial(f, n, generator=rng) for f in (torch.randn, torch.rand))
    mask, segments = (uniform() < 0.7).int(), (torch.arange(n) // 23).clamp(max=9)
    mask[segments == 4] = 0  # a sequence that counts for nothing
    weights, count = token_weights(mode, mask, segments, 10, 50)
    new = -normal().abs()
    old = new + 0.8 * normal()
    fill = lambda x: torch.where(mask == 0, torch.nan, x)  # noqa: E731
    tokens = TokenBatch(
        weights=weights,
        count=count,
        advantages=fill(normal()),
        old_log_probs=fill(old),
        ref_log_probs=fill(new + 1.5 * normal()),
        rollout_log_probs=fill(old + 0.4 * normal()),
        is_current=uniform() < 0.6,
        exp_mask=uniform() < 0.4,
    )
    if config.policy_loss == "gspo":
        tokens = replace(tokens, sequence_log_ratio=fill(means_of_sequences(new - old, mask, segments)))
    kl = fill(normal().abs()) if config.kl_loss_type == "full" else None
    if config.report_stale:
        tokens = replace(tokens, is_stale=~tokens.is_current & (uniform() < 0.7))
    return Case(fill(new), fill(normal().abs()), replace(tokens, **changes), config, kl)


def means_of_sequences(values: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """At each token, the mean over the counted tokens of its segment;
    any number in a segment without one."""
    rows = list(zip(segments.tolist(), mask.tolist(), values.tolist(), strict=True))
    parts = {segment: [value for s, counts, value in rows if s == segment and counts] for segment, _, _ in rows}
    return torch.tensor([sum(parts[segment]) / max(1, len(parts[segment])) for segment, _, _ in rows])


def by_hand(config: LossConfig, rows: list[tuple[float, ...]]) -> Case:
    """Of rows (advantage, lp - old, ref - lp, old - rollout, exp_mask); lp = -1, every token
    counts. With a ratio of whole sequences the second is that of the sequence."""
    adv, log_ratio, ref, server, exp_mask = torch.tensor(rows).T
    new = torch.full_like(adv, -1.0)
    old = new - log_ratio
    over_sequences = {"sequence_log_ratio": log_ratio} if config.policy_loss == "gspo" else {}
    tokens = TokenBatch(
        weights=torch.ones_like(adv),
        count=torch.tensor(len(rows)),
        advantages=adv,
        old_log_probs=old,
        ref_log_probs=new + ref,
        rollout_log_probs=old - server,
        exp_mask=exp_mask,
        **over_sequences,
    )
    return Case(new, torch.ones_like(adv), tokens, config)


def of_chances(config: LossConfig, rows: list[tuple[float, float, float]]) -> Case:
    """Of rows (advantage, log-prob, old log-prob); every token counts."""
    adv, new, old = torch.tensor(rows).T
    return Case(new, None, TokenBatch(torch.ones_like(adv), torch.tensor(len(rows)), adv, old), config)


EVERYTHING = LossConfig(
    clip=Clip(0.2, 0.28, 3.0),
    use_kl_loss=True,
    kl_loss_coef=0.3,
    entropy_coef=0.2,
    report_entropy=True,
    off_policy=OffPolicy(),
    rollout_is_threshold=1.3,
)
HIGHER = replace(EVERYTHING, off_policy=OffPolicy("dapo_clip_higher", clip_high=1.0))
CISPO = replace(EVERYTHING, policy_loss="cispo")
SAPO = replace(EVERYTHING, policy_loss="sapo")
TV, KL = (replace(EVERYTHING, policy_loss=kind) for kind in ("dppo_tv", "dppo_kl"))
STALE = replace(EVERYTHING, report_stale=True)
ICEPOP = replace(EVERYTHING, rollout_is_threshold_lower=0.8)
EDGES = replace(EVERYTHING, clip=Clip(0.0, 0.0, 1.0), rollout_is_threshold=1.0)

WEIGHED = replace(EVERYTHING, rollout_is_threshold=None)
BYPASS = replace(WEIGHED, bypass_mode=True, report_stale=True)


def weighed(case: Case) -> Case:
    """Some tokens are rejected; NaN at all uncounted tokens."""
    importance = torch.rand(len(case.log_probs), generator=torch.Generator().manual_seed(1)) * 2 - 0.5
    importance = torch.where(case.tokens.weights == 0, torch.nan, importance.clamp(min=0))
    return replace(case, tokens=replace(case.tokens, importance=importance))


def bypassing(case: Case) -> Case:
    return replace(case, tokens=replace(case.tokens, old_log_probs=case.tokens.rollout_log_probs))


CASES: dict[str, Callable[[], Case]] = {
    "a few tokens": lambda: random_case(EVERYTHING, n=60, seed=15),
    "everything": lambda: random_case(EVERYTHING),
    "replayed tokens with a bound of their own": lambda: random_case(HIGHER, seed=1),
    "what a default run has": lambda: random_case(LossConfig(clip=Clip(0.2, 0.28, 3.0), report_entropy=True), seed=2),
    "exactly at every bound": lambda: by_hand(
        EDGES, [(a, x, 0.0, 0.0, e) for a in (1.0, -2.0, 0.0) for x in (0.0, 0.5, -0.5) for e in (0.0, 1.0)]
    ),
    "up to the clamps and beyond": lambda: by_hand(
        replace(EVERYTHING, clip=Clip(0.2, 0.28), rollout_is_threshold=1e9),
        [(a, x, -x, x, 0.0) for a in (1.0, -1.0) for x in (20.0, 20.5, -20.0, -20.5, 30.0, -30.0)],
    ),
    "small weights of the server, large k3": lambda: by_hand(
        EVERYTHING, [(-1.0, 0.1, x, -abs(x), 0.0) for x in (-9.0, -10.9, -11.1, 2.5, 2.7, -19.0, 15.0)]
    ),
    "tiny differences": lambda: by_hand(EVERYTHING, [(1.0, 0.0, x, -x, 0.0) for x in (1e-6, -2e-5, 3e-4)]),
    "k1": lambda: random_case(replace(EVERYTHING, kl_loss_type="kl", off_policy=None), seed=3),
    "abs": lambda: random_case(replace(EVERYTHING, kl_loss_type="abs", rollout_is_threshold=None), seed=4),
    "abs, exactly 0": lambda: by_hand(replace(EDGES, kl_loss_type="abs"), [(0.0, 0.0, 0.0, 0.0, 0.0)] * 2),
    "k2": lambda: random_case(replace(EVERYTHING, kl_loss_type="mse"), seed=5),
    "full KL": lambda: random_case(
        replace(EVERYTHING, kl_loss_type="full", off_policy=None), seed=16, ref_log_probs=None
    ),
    "replayed tokens with the bound of the others": lambda: random_case(
        replace(EVERYTHING, off_policy=OffPolicy("dapo_clip_higher")), seed=6
    ),
    "another beta, no dual clip": lambda: random_case(
        replace(EVERYTHING, clip=Clip(0.1, 0.5), off_policy=OffPolicy(beta=0.5)), seed=7
    ),
    "nothing but the policy": lambda: random_case(LossConfig(report_mismatch=False), seed=8),
    "weights without a comparison": lambda: random_case(
        LossConfig(report_mismatch=False, rollout_is_threshold=0.9), seed=9
    ),
    "no token was replayed": lambda: random_case(EVERYTHING, seed=10, exp_mask=None),
    "the old policy is the current one": lambda: random_case(
        replace(EVERYTHING, off_policy=None), seed=11, old_log_probs=None
    ),
    "tokens of older weights": lambda: random_case(STALE, seed=17),
    "no token is of older weights": lambda: random_case(STALE, seed=18, is_stale=None),
    "every token is of older weights": lambda: random_case(
        STALE, seed=19, is_current=torch.zeros(300).bool(), is_stale=torch.ones(300).bool()
    ),
    "older weights without a comparison": lambda: random_case(replace(STALE, report_mismatch=False), seed=20),
    "ratios out of bounds count nothing": lambda: random_case(ICEPOP, seed=21),
    "exactly at the bounds": lambda: by_hand(
        replace(ICEPOP, rollout_is_threshold=1.0, rollout_is_threshold_lower=1.0),
        [(1.0, 0.0, 0.0, x, 0.0) for x in (0.0, 0.5, -0.5)],
    ),
    "weights of the step's making": lambda: weighed(random_case(WEIGHED, seed=22)),
    "rejected tokens alone": lambda: random_case(WEIGHED, seed=23, importance=torch.zeros(300)),
    "the server's log-probs stand for the old ones": lambda: bypassing(random_case(BYPASS, seed=24)),
    "every token is of these weights": lambda: random_case(EVERYTHING, seed=12, is_current=None),
    "a weighed log-prob, and all else": lambda: random_case(CISPO, seed=17),
    "a weighed log-prob alone": lambda: random_case(
        LossConfig(clip=Clip(0.3, 0.5), policy_loss="cispo", report_mismatch=False), seed=18
    ),
    "a weighed log-prob with weights of the step's making": lambda: weighed(
        random_case(replace(CISPO, rollout_is_threshold=None), seed=25)
    ),
    "a weight without a lower bound": lambda: random_case(
        replace(CISPO, clip=Clip(1.0, 4.0), off_policy=None), mode="seq-mean-token-mean", seed=19
    ),
    "a weighed log-prob at every bound and beyond the clamps": lambda: by_hand(
        replace(CISPO, clip=Clip(0.0, 0.0)),
        [(a, x, 0.0, 0.0, e) for a in (1.0, -2.0, 0.0) for x in (0.0, 0.5, -0.5, 20.5, -20.5) for e in (0.0, 1.0)],
    ),
    "a weighed log-prob of the current policy": lambda: random_case(
        replace(CISPO, off_policy=None), seed=20, old_log_probs=None
    ),
    "a gate, and all else": lambda: random_case(SAPO, seed=27),
    "a gate alone": lambda: random_case(
        LossConfig(clip=Clip(tau_pos=0.4, tau_neg=1.2), policy_loss="sapo", report_mismatch=False), seed=28
    ),
    "a gate at a ratio of 1 and beyond the clamps": lambda: by_hand(
        SAPO, [(a, x, 0.0, 0.0, e) for a in (1.0, -2.0, 0.0) for x in (0.0, 0.5, -0.5, 20.5, -20.5) for e in (0.0, 1.0)]
    ),
    "a gate of the current policy": lambda: random_case(replace(SAPO, off_policy=None), seed=29, old_log_probs=None),
    "a mask by total variation, and all else": lambda: random_case(TV, seed=30),
    "a mask by KL, and all else": lambda: random_case(KL, seed=31),
    "a mask by KL alone": lambda: random_case(
        LossConfig(clip=Clip(divergence=0.03), policy_loss="dppo_kl", report_mismatch=False), seed=32
    ),
    "a mask with weights of the step's making": lambda: weighed(
        random_case(replace(TV, rollout_is_threshold=None), seed=33)
    ),
    "a mask of the current policy": lambda: random_case(replace(KL, off_policy=None), seed=34, old_log_probs=None),
    "a mask at every bound and beyond the clamps": lambda: by_hand(
        replace(TV, clip=Clip(divergence=0.1)),
        [(a, x, 0.0, 0.0, e) for a in (1.0, -2.0, 0.0) for x in (0.0, 0.5, -0.5, 20.5, -20.5) for e in (0.0, 1.0)],
    ),
    "a total variation of exactly the largest": lambda: of_chances(
        LossConfig(clip=Clip(divergence=1.0), policy_loss="dppo_tv", report_mismatch=False),
        [(1.0, 0.0, -800.0), (-1.0, -800.0, 0.0)],
    ),
    "a chance that is rounded to 1": lambda: of_chances(
        LossConfig(clip=Clip(divergence=0.0342), policy_loss="dppo_kl", report_mismatch=False),
        [(1.0, 0.0, math.log(chance)) for chance in (0.997, 0.999)] + [(-1.0, -0.01, 0.0), (1.0, 0.0, 0.0)],
    ),
    "none counts": lambda: random_case(EVERYTHING, seed=13, weights=torch.zeros(300), count=torch.tensor(0)),
    "no tokens": lambda: random_case(EVERYTHING, n=0, count=torch.tensor(5)),
    "one token": lambda: random_case(EVERYTHING, n=1, weights=torch.full((1,), 0.5)),
    **{mode: functools.partial(random_case, EVERYTHING, mode=mode, seed=14) for mode in AGGREGATIONS},
}

GSPO = replace(EVERYTHING, policy_loss="gspo", off_policy=None)
# only the torch backend: the ratio is one of whole sequences
SEQUENCE_CASES: dict[str, Callable[[], Case]] = {
    "a ratio of sequences, and all else": lambda: random_case(replace(GSPO, clip=Clip(0.1, 0.1, 1.12)), seed=21),
    "a ratio of sequences, clipped as in its paper": lambda: random_case(
        LossConfig(clip=Clip(3e-4, 4e-4), policy_loss="gspo"), mode="seq-mean-token-mean", seed=22
    ),
    "a ratio of sequences with weights of the step's making": lambda: weighed(
        random_case(replace(GSPO, rollout_is_threshold=None, clip=Clip(0.1, 0.1, 1.12)), seed=26)
    ),
    "a ratio of sequences with the full KL": lambda: random_case(replace(GSPO, kl_loss_type="full"), seed=23),
    "a ratio of sequences at every bound and beyond the clamps": lambda: by_hand(
        replace(GSPO, clip=Clip(0.0, 0.0, 1.5)),
        [(a, x, 0.0, 0.0, 0.0) for a in (1.0, -2.0, 0.0) for x in (0.0, 0.25, -0.25, 0.5, 20.0, 20.5, -20.5)],
    ),
}


@functools.cache
def case_and_expected(name: str) -> tuple[Case, Expected]:
    case = (CASES | SEQUENCE_CASES)[name]()
    return case, expected(case)
