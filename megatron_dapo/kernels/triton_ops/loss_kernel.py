"""The actor's loss of N tokens, its gradient and every metric: one launch over the tokens, one over
the blocks' sums.

The algorithm is `algorithms.dapo_loss`. Arithmetic is float32; a block's sums are float32 trees
over 256 tokens. The sums over blocks are float64 in a fixed order, so that two runs give equal
bits. Of an uncounted token only the weight is read; its other fields are taken as 0, so NaN in
padding goes nowhere. NaN in a counted token shows in the loss, and in its sums and maxima.

exp(x) - 1 - x in k3 is a difference of nearly equal numbers. For |x| < 1/2 its Taylor series is
summed, which keeps the digits of float32 down to the smallest x. Numbers of the config are
arguments, not constants of the compilation. Only another set of terms in the loss compiles
anew: other constexpr arguments, or other tensors that are None.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, metric_names
from megatron_dapo.kernels.token_loss import TokenLoss

BLOCK = 256  # 32768 tokens are 128 programs: one wave on every GPU this is meant for
REDUCE_ROWS = 32
NUM_WARPS = 4
LARGEST_LOG_RATIO = tl.constexpr(20.0)
LARGEST_KL = tl.constexpr(10.0)
SMALLEST_CHANCE = tl.constexpr(1e-8)
POINTERS = (
    "log_probs weights advantages old_log_probs ref_log_probs rollout_log_probs is_current is_stale importance "
    "exp_mask entropy count grad_log_probs grad_entropy grad_kl partials"
).split()


def token_loss(
    log_probs_N: Tensor,
    entropy_N: Tensor | None,
    tokens: TokenBatch,
    config: LossConfig,
    kl_N: Tensor | None = None,
) -> TokenLoss:
    """Compute `kernels.token_loss.token_loss` for any float dtype up to float32; the gradients are
    float32."""
    num_tokens, device = log_probs_N.numel(), log_probs_N.device
    sum_names, max_names = metric_names(config)
    num_sums, num_columns = 2 * len(sum_names), 2 * len(sum_names) + len(max_names)
    # at N = 0 the count is still to be reported
    num_blocks = max(triton.cdiv(num_tokens, BLOCK), 1)

    empty = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
    grad_log_probs, loss = empty(num_tokens), empty()
    grad_entropy = empty(num_tokens) if config.sends_entropy_backward else None
    grad_kl = empty(num_tokens) if config.use_full_kl else None
    partials, totals = empty(num_blocks, num_columns, dtype=torch.float64), empty(num_columns, dtype=torch.float64)

    assert not config.is_over_sequences, "the kernel knows no sequences"
    assert tokens.importance is None or config.rollout_is_threshold is None, "tokens are weighed once"
    clip, off = config.clip, config.off_policy
    off_high = clip.high if off is None or off.clip_high is None else off.clip_high
    token_loss_kernel[(num_blocks,)](
        _flat(log_probs_N),
        _flat(tokens.weights),
        _flat(tokens.advantages),
        _flat(tokens.old_log_probs),
        _flat(kl_N if config.use_full_kl else tokens.ref_log_probs, config.use_kl_loss),
        _flat(tokens.rollout_log_probs, config.report_mismatch or config.rollout_is_threshold is not None),
        _flat(tokens.is_current, config.report_mismatch),
        _flat(tokens.is_stale, config.report_stale),
        _flat(tokens.importance),
        _flat(tokens.exp_mask, off is not None),
        _flat(entropy_N, config.report_entropy),
        tokens.count,
        grad_log_probs,
        grad_entropy,
        grad_kl,
        partials,
        num_tokens,
        1.0 - clip.low,
        1.0 + clip.high,
        float("inf") if clip.dual is None else float(clip.dual),
        clip.tau_pos,
        clip.tau_neg,
        clip.divergence,
        1.0 + off_high,
        0.0 if off is None else float(off.beta),
        0.0 if config.rollout_is_threshold_lower is None else float(config.rollout_is_threshold_lower),
        float("inf") if config.rollout_is_threshold is None else float(config.rollout_is_threshold),
        float(config.kl_loss_coef),
        float(config.entropy_coef),
        LOSS=config.policy_loss,
        KL=config.kl_loss_type if config.use_kl_loss else "none",
        OFF_POLICY="none" if off is None else off.mode,
        IS=_importance(config),
        MISMATCH=config.report_mismatch,
        STALE=config.report_stale,
        BYPASS=config.bypass_mode,
        SUMS=sum_names,
        MAXIMA=max_names,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    reduce_kernel[(1,)](
        partials,
        totals,
        loss,
        num_blocks,
        NUM_SUMS=num_sums,
        NUM_COLUMNS=num_columns,
        COLUMNS=triton.next_power_of_2(num_columns),
        ROWS=REDUCE_ROWS,
        num_warps=NUM_WARPS,
    )
    return TokenLoss(loss, grad_log_probs, grad_entropy, totals[:num_sums].view(-1, 2), totals[num_sums:], grad_kl)


def _importance(config: LossConfig) -> str:
    """Return the treatment of an out-of-bounds ratio to the server; "none" without importance
    weights."""
    if config.rollout_is_threshold is None:
        return "none"
    return "truncate" if config.rollout_is_threshold_lower is None else "mask"


def _flat(values: Tensor | None, is_read: bool = True) -> Tensor | None:
    if values is None or not is_read:
        return None
    values = values.contiguous()
    return values.view(torch.uint8) if values.dtype == torch.bool else values


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=POINTERS)
def token_loss_kernel(
    log_probs,  # [N], like all up to `entropy`; None if the loss does not read it
    weights,
    advantages,
    old_log_probs,
    ref_log_probs,  # with KL == "full" the KL itself
    rollout_log_probs,
    is_current,
    is_stale,
    importance,
    exp_mask,
    entropy,
    count,  # scalar
    grad_log_probs,  # [N]
    grad_entropy,  # [N], or None, as is
    grad_kl,
    partials,  # [blocks, columns] float64: (sum, count) of every name of SUMS, then MAXIMA
    num_tokens,
    ratio_low,
    ratio_high,
    dual,
    tau_pos,
    tau_neg,
    divergence,
    off_ratio_high,
    beta,
    rollout_is_threshold_lower,
    rollout_is_threshold,
    kl_coef,
    entropy_coef,
    LOSS: tl.constexpr,
    KL: tl.constexpr,
    OFF_POLICY: tl.constexpr,
    IS: tl.constexpr,
    MISMATCH: tl.constexpr,
    STALE: tl.constexpr,
    BYPASS: tl.constexpr,
    SUMS: tl.constexpr,  # both from `metric_names`
    MAXIMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = token < num_tokens
    w = tl.load(weights + token, mask=is_inside, other=0.0).to(tl.float32)
    counted = w != 0.0
    lp = tl.load(log_probs + token, mask=counted, other=0.0).to(tl.float32)
    adv = tl.load(advantages + token, mask=counted, other=0.0).to(tl.float32)
    old = lp
    if old_log_probs is not None:
        old = tl.load(old_log_probs + token, mask=counted, other=0.0).to(tl.float32)
    rollout = lp
    if rollout_log_probs is not None:
        rollout = tl.load(rollout_log_probs + token, mask=counted, other=0.0).to(tl.float32)

    # the policy's loss and its derivative by the log-prob, before weights
    log_ratio = _clamped(lp - old)
    ratio = tl.exp(log_ratio)
    nowhere = counted & (w == 0.0)
    too_bad = nowhere
    if LOSS == "cispo":
        slope = -adv * _bounded(ratio, ratio_low, ratio_high)
        loss = slope * lp
    elif LOSS == "sapo":
        loss, slope = _gated(ratio, adv, tau_pos, tau_neg)
    elif LOSS == "dapo":
        loss, slope, too_bad = _clipped(ratio, adv, ratio_low, ratio_high, dual)
    else:
        loss, is_masked = _masked(lp, old, ratio, adv, divergence, LOSS)
        slope = loss
    replayed = nowhere
    if exp_mask is not None:
        replayed = tl.load(exp_mask + token, mask=counted, other=0) != 0
        if OFF_POLICY == "dapo_clip_higher":
            off_loss, off_slope, _ = _clipped(ratio, adv, ratio_low, off_ratio_high, dual)
        else:
            off_loss, off_slope = _shaped(ratio, adv, beta)
        loss = tl.where(replayed, off_loss, loss)
        slope = tl.where(replayed, off_slope, slope)
    if LOSS == "cispo":  # no token loses its gradient
        slope = tl.where((log_ratio == lp - old) | (replayed == 0), slope, 0.0)
    else:
        slope = tl.where(log_ratio == lp - old, slope, 0.0)
    if importance is not None:
        factor = tl.load(importance + token, mask=counted, other=0.0).to(tl.float32)
        loss *= factor
        slope *= factor
    if IS != "none":
        server_ratio = tl.exp(_clamped(old - rollout))
        is_outside = server_ratio > rollout_is_threshold
        bounded = tl.where(is_outside, rollout_is_threshold, server_ratio)
        if IS == "mask":
            is_outside = is_outside | (server_ratio < rollout_is_threshold_lower)
            bounded = tl.where(is_outside, 0.0, server_ratio)
        loss *= bounded
        slope *= bounded
    policy = w * loss
    total = policy
    grad = w * slope

    if ref_log_probs is not None:
        ref = tl.load(ref_log_probs + token, mask=counted, other=0.0).to(tl.float32)
        if KL == "full":
            kl = ref
            kl_slope = tl.zeros([BLOCK], tl.float32)
        else:
            kl, kl_slope = _kl(lp - ref, KL)
        weighted_kl = w * kl
        total += kl_coef * weighted_kl
        grad += kl_coef * (w * kl_slope)
    if entropy is not None:
        h = tl.load(entropy + token, mask=counted, other=0.0).to(tl.float32)
        total -= entropy_coef * (w * h)
    tl.store(grad_log_probs + token, grad, mask=is_inside)
    if grad_entropy is not None:
        tl.store(grad_entropy + token, -entropy_coef * w, mask=is_inside)
    if grad_kl is not None:
        tl.store(grad_kl + token, kl_coef * w, mask=is_inside)

    # the metrics of `dapo_loss`, by name; each one's inputs are computed just before it, or
    # registers spill
    on_policy = counted & (replayed == 0)
    num_counted = _number(counted)
    num_on_policy = _number(on_policy)
    batch_count = tl.where(block == 0, tl.load(count).to(tl.float64), 0.0)
    policy_sum = tl.sum(policy, 0)
    ratio_sum = tl.sum(tl.where(counted, ratio, 0.0), 0)
    row = partials + block * (2 * len(SUMS) + len(MAXIMA))
    _put(row, SUMS, "actor/loss", tl.sum(total, 0), batch_count)
    _put(row, SUMS, "actor/pg_loss", policy_sum, batch_count)
    if OFF_POLICY == "none":
        _put(row, SUMS, "actor/on_pg_loss", policy_sum, batch_count)
    else:
        own_sum = tl.sum(tl.where(on_policy, policy, 0.0), 0)
        _put(row, SUMS, "actor/on_pg_loss", own_sum, tl.sum(tl.where(on_policy, w, 0.0), 0))
    if LOSS == "dapo":
        is_above = on_policy & (adv > 0.0) & (ratio > ratio_high)
    elif LOSS == "cispo":
        is_above = on_policy & (ratio > ratio_high)
    elif LOSS == "sapo":
        is_above = nowhere
    else:
        is_above = on_policy & (adv > 0.0) & is_masked
    _put(row, SUMS, "actor/on_pg_clipfrac", _number(is_above), num_on_policy)
    if LOSS == "dapo":
        is_below = on_policy & (adv < 0.0) & (ratio < ratio_low)
    elif LOSS == "cispo":
        is_below = on_policy & (ratio < ratio_low)
    elif LOSS == "sapo":
        is_below = nowhere
    else:
        is_below = on_policy & (adv < 0.0) & is_masked
    _put(row, SUMS, "actor/on_pg_clipfrac_lower", _number(is_below), num_on_policy)
    _put(row, SUMS, "actor/dual_clipfrac", _number(on_policy & too_bad), num_on_policy)
    _put(row, SUMS, "actor/ppo_kl", tl.sum(-log_ratio, 0), num_counted)
    _put(row, SUMS, "actor/ratio_mean", ratio_sum, num_counted)
    if OFF_POLICY != "none":
        off_sum = tl.sum(tl.where(replayed, policy, 0.0), 0)
        _put(row, SUMS, "actor/off_pg_loss", off_sum, tl.sum(tl.where(replayed, w, 0.0), 0))
        _put(row, SUMS, "exp_mask_ratio", num_counted - num_on_policy, num_counted)
    _put(row, SUMS, "actor/entropy_sampled", tl.sum(-lp, 0), num_counted)
    if IS != "none":
        _put(row, SUMS, "actor/rollout_is_mean", tl.sum(tl.where(counted, bounded, 0.0), 0), num_counted)
        _put(row, SUMS, "actor/rollout_is_truncated", _number(counted & is_outside), num_counted)
    if entropy is not None:
        _put(row, SUMS, "actor/entropy", tl.sum(h, 0), num_counted)
    if ref_log_probs is not None:
        _put(row, SUMS, "actor/kl_loss", tl.sum(weighted_kl, 0), batch_count)
    if MISMATCH:
        compared = counted
        if is_current is not None:
            compared = tl.load(is_current + token, mask=counted, other=0) != 0
        trainer = old
        if BYPASS:
            trainer = lp
        num_compared = _number(compared)
        diff = tl.where(compared, trainer - rollout, 0.0)
        weight = tl.where(compared, tl.exp(_clamped(diff)), 0.0)
        weight_sum = tl.sum(weight, 0)
        square_sum = tl.sum(weight * weight, 0)
        diff_sum = tl.sum(tl.abs(diff), 0)
        _put(row, SUMS, "actor/rollout_kl", tl.sum(-diff, 0), num_compared)
        _put(row, SUMS, "actor/rollout_k3", tl.sum(_exp_minus_1_minus(_clamped(diff)), 0), num_compared)
        _put(row, SUMS, "actor/rollout_abs_diff", diff_sum, num_compared)
        _put(row, SUMS, "_rollout_weight", weight_sum, num_compared)
        _put(row, SUMS, "_rollout_weight_squared", square_sum, num_compared)
        if STALE:
            older = nowhere
            if is_stale is not None:
                older = tl.load(is_stale + token, mask=counted, other=0) != 0
            num_older = _number(older)
            older_diff = tl.where(older, trainer - rollout, 0.0)
            older_weight = tl.where(older, tl.exp(_clamped(older_diff)), 0.0)
            older_weight_sum = tl.sum(older_weight, 0)
            older_square_sum = tl.sum(older_weight * older_weight, 0)
            _put(row, SUMS, "actor/rollout_kl_stale", tl.sum(-older_diff, 0), num_older)
            _put(row, SUMS, "actor/rollout_k3_stale", tl.sum(_exp_minus_1_minus(_clamped(older_diff)), 0), num_older)
            _put(row, SUMS, "_rollout_weight_stale", older_weight_sum, num_older)
            _put(row, SUMS, "_rollout_weight_squared_stale", older_square_sum, num_older)
            num_both = num_compared + num_older
            _put(row, SUMS, "_rollout_weight_all", weight_sum + older_weight_sum, num_both)
            _put(row, SUMS, "_rollout_weight_squared_all", square_sum + older_square_sum, num_both)
    maxima = row + 2 * len(SUMS)
    _put_largest(maxima, MAXIMA, "actor/ratio_max", tl.where(counted, ratio, 0.0), ratio_sum)
    if MISMATCH:
        _put_largest(maxima, MAXIMA, "actor/rollout_abs_diff_max", tl.abs(diff), diff_sum)


@triton.jit(do_not_specialize=["num_blocks"])
def reduce_kernel(
    partials,  # [num_blocks, NUM_COLUMNS] float64
    totals,  # [NUM_COLUMNS] float64
    loss,  # scalar float32: the first column
    num_blocks,
    NUM_SUMS: tl.constexpr,  # columns to be added; of the rest the largest is taken
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    is_column = column < NUM_COLUMNS
    total = tl.zeros([COLUMNS], tl.float64)
    largest = tl.zeros([COLUMNS], tl.float64)
    for start in range(0, num_blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        mask = (block < num_blocks)[:, None] & is_column[None, :]
        values = tl.load(partials + block[:, None] * NUM_COLUMNS + column[None, :], mask=mask, other=0.0)
        total += tl.sum(values, 0)
        largest = tl.maximum(largest, tl.max(values, 0))
    largest = tl.where(total != total, total, largest)  # a maximum does not pass NaN on
    tl.store(totals + column, tl.where(column < NUM_SUMS, total, largest), mask=is_column)
    tl.store(loss + column, total.to(tl.float32), mask=column == 0)


@triton.jit
def _clamped(x):
    """x within +-20; NaN stays."""
    return _bounded(x, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


@triton.jit
def _bounded(x, low, high):
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def _clipped(ratio, adv, low, high, dual):
    """Return the clipped loss, its derivative by the log of the ratio, and the tokens of the dual
    clip."""
    free = -adv * ratio
    bounded = -adv * _bounded(ratio, low, high)
    is_free = free >= bounded
    too_bad = (adv < 0.0) & (ratio > dual)
    loss = tl.where(too_bad, -adv * dual, tl.where(is_free, free, bounded))
    return loss, tl.where(is_free & (too_bad == 0), free, 0.0), too_bad


@triton.jit
def _gated(ratio, adv, tau_pos, tau_neg):
    """Return -adv * 4 / tau * sigmoid(tau * (ratio - 1)), and its derivative by the log of the
    ratio."""
    tau = tl.where(adv > 0.0, tau_pos, tau_neg)
    x = tau * (ratio - 1.0)
    # the sigmoid is 1 / (1 + e) or e / (1 + e); so its derivative keeps its digits
    e = tl.exp(-tl.abs(x))
    gate = tl.where(x > 0.0, 1.0, e) / (1.0 + e)
    return -adv * (4.0 / tau) * gate, -adv * ratio * (4.0 * e / ((1.0 + e) * (1.0 + e)))


@triton.jit
def _masked(lp, old, ratio, adv, largest, LOSS: tl.constexpr):
    """Return the loss, also its derivative by the log of the ratio, and the masked tokens."""
    chance = tl.exp(lp)
    old_chance = tl.exp(old)
    if LOSS == "dppo_tv":
        divergence = tl.abs(chance - old_chance)
    else:
        other = tl.maximum(1.0 - chance, SMALLEST_CHANCE)
        old_other = tl.maximum(1.0 - old_chance, SMALLEST_CHANCE)
        divergence = old_chance * (old - lp) + old_other * tl.log(old_other / other)
    moves_on = ((adv > 0.0) & (lp > old)) | ((adv < 0.0) & (lp < old))
    is_masked = moves_on & (divergence > largest)
    return tl.where(is_masked, 0.0, -adv * ratio), is_masked


@triton.jit
def _shaped(ratio, adv, beta):
    """-adv * ratio / (ratio + beta), and its derivative by the log of the ratio."""
    odds = beta / ratio
    share = 1.0 / (1.0 + odds)
    return -adv * share, -adv * (share * share) * odds


@triton.jit
def _exp_minus_1_minus(x):
    series = 1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * (1.0 + x / 7.0 * (1.0 + x / 8.0)))))
    return tl.where(tl.abs(x) < 0.5, 0.5 * x * x * series, tl.exp(x) - 1.0 - x)


@triton.jit
def _kl(k1, KIND: tl.constexpr):
    """The estimator and its derivative by the log-prob."""
    if KIND == "kl":
        kl = k1
        slope = tl.full(k1.shape, 1.0, tl.float32)
    elif KIND == "abs":
        kl = tl.abs(k1)
        slope = tl.where(k1 > 0.0, 1.0, tl.where(k1 < 0.0, -1.0, 0.0))
    elif KIND == "mse":
        kl = 0.5 * k1 * k1
        slope = k1
    else:
        x = _clamped(-k1)
        k3 = _exp_minus_1_minus(x)
        kl = tl.where(k3 > LARGEST_KL, LARGEST_KL, k3)
        slope = tl.where((x == -k1) & (k3 <= LARGEST_KL), -(k3 + x), 0.0)
    return kl, slope


@triton.jit
def _number(is_true):
    return tl.sum(tl.where(is_true, 1.0, 0.0), 0)


@triton.constexpr_function
def _position(names, name):
    """Return the position of a name among the names; an unknown name fails the compilation."""
    declared = list(names)  # Triton's tuple has no index()
    if name not in declared:
        raise ValueError(f"the loss kernel stores {name}, which dapo_loss does not declare with this config")
    return declared.index(name)


@triton.jit
def _put(row, NAMES: tl.constexpr, NAME: tl.constexpr, total, number):
    """Stores the (sum, count) of a metric."""
    place = row + 2 * _position(NAMES, NAME)
    tl.store(place, total.to(tl.float64))
    tl.store(place + 1, number.to(tl.float64))


@triton.jit
def _put_largest(row, NAMES: tl.constexpr, NAME: tl.constexpr, values, total):
    """Store the largest value; NaN if the total is NaN, since a maximum does not pass NaN on."""
    largest = tl.where(total != total, total, tl.max(values, 0))
    tl.store(row + _position(NAMES, NAME), largest.to(tl.float64))
