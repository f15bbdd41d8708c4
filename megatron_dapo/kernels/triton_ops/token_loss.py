"""The actor's loss of N tokens, its gradient and every metric: one launch over the tokens, one over the blocks' sums.

What is computed is `algorithms.dapo_loss`. Arithmetic is float32; a block's sums are float32 trees over 256 tokens,
and the sums over blocks are float64 in a fixed order, so that two runs give equal bits. A token that does not count is
never read past its weight: its other fields are taken as 0, and NaN in padding goes nowhere. NaN in a token that counts
shows in the loss, in the sums and in the maxima it belongs to.

exp(x) - 1 - x, of which k3 is made, is a difference of nearly equal numbers: for |x| < 1/2 its Taylor series is summed,
which keeps the digits of float32 down to the smallest x. Numbers of the config are arguments, not constants of the
compilation; only what the loss is made of (see the constexpr arguments, and which tensors are None) compiles anew.
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
POINTERS = (
    "log_probs weights advantages old_log_probs ref_log_probs rollout_log_probs is_current exp_mask entropy count "
    "grad_log_probs grad_entropy grad_kl partials"
).split()


def token_loss(
    log_probs_N: Tensor,
    entropy_N: Tensor | None,
    tokens: TokenBatch,
    config: LossConfig,
    kl_N: Tensor | None = None,
) -> TokenLoss:
    """Compute `kernels.token_loss.token_loss` for any float dtype up to float32; the gradients are float32."""
    num_tokens, device = log_probs_N.numel(), log_probs_N.device
    sum_names, max_names = metric_names(config)
    num_sums, num_columns = 2 * len(sum_names), 2 * len(sum_names) + len(max_names)
    num_blocks = max(triton.cdiv(num_tokens, BLOCK), 1)  # at N = 0 the count is still to be reported

    empty = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
    grad_log_probs, loss = empty(num_tokens), empty()
    grad_entropy = empty(num_tokens) if config.sends_entropy_backward else None
    grad_kl = empty(num_tokens) if config.use_full_kl else None
    partials, totals = empty(num_blocks, num_columns, dtype=torch.float64), empty(num_columns, dtype=torch.float64)

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
        1.0 + off_high,
        0.0 if off is None else float(off.beta),
        float("inf") if config.rollout_is_threshold is None else float(config.rollout_is_threshold),
        float(config.kl_loss_coef),
        float(config.entropy_coef),
        KL=config.kl_loss_type if config.use_kl_loss else "none",
        OFF_POLICY="none" if off is None else off.mode,
        TIS=config.rollout_is_threshold is not None,
        MISMATCH=config.report_mismatch,
        NUM_COLUMNS=num_columns,
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


def _flat(values: Tensor | None, is_read: bool = True) -> Tensor | None:
    if values is None or not is_read:
        return None
    values = values.contiguous()
    return values.view(torch.uint8) if values.dtype == torch.bool else values


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=POINTERS)
def token_loss_kernel(
    log_probs,  # [N], as all up to `entropy`; None where the loss does not read it
    weights,
    advantages,
    old_log_probs,
    ref_log_probs,  # with KL == "full" the KL itself
    rollout_log_probs,
    is_current,
    exp_mask,
    entropy,
    count,  # scalar
    grad_log_probs,  # [N]
    grad_entropy,  # [N], or None, as is
    grad_kl,
    partials,  # [blocks, NUM_COLUMNS] float64: (sum, count) of every row of `metric_names`, then the maxima
    num_tokens,
    ratio_low,
    ratio_high,
    dual,
    off_ratio_high,
    beta,
    rollout_is_threshold,
    kl_coef,
    entropy_coef,
    KL: tl.constexpr,
    OFF_POLICY: tl.constexpr,
    TIS: tl.constexpr,
    MISMATCH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
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
    loss, slope, too_bad = _clipped(ratio, adv, ratio_low, ratio_high, dual)
    replayed = counted & (w == 0.0)  # nowhere
    if exp_mask is not None:
        replayed = tl.load(exp_mask + token, mask=counted, other=0) != 0
        if OFF_POLICY == "dapo_clip_higher":
            off_loss, off_slope, _ = _clipped(ratio, adv, ratio_low, off_ratio_high, dual)
        else:
            off_loss, off_slope = _shaped(ratio, adv, beta)
        loss = tl.where(replayed, off_loss, loss)
        slope = tl.where(replayed, off_slope, slope)
    slope = tl.where(log_ratio == lp - old, slope, 0.0)
    if TIS:
        server_ratio = tl.exp(_clamped(old - rollout))
        importance = tl.where(server_ratio > rollout_is_threshold, rollout_is_threshold, server_ratio)
        loss *= importance
        slope *= importance
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

    # one row per metric of `dapo_loss`, in the order of its names (`metric_names`)
    on_policy = counted & (replayed == 0)
    num_counted = _number(counted)
    num_on_policy = _number(on_policy)
    batch_count = tl.where(block == 0, tl.load(count).to(tl.float64), 0.0)
    policy_sum = tl.sum(policy, 0)
    ratio_sum = tl.sum(tl.where(counted, ratio, 0.0), 0)
    row = partials + block * NUM_COLUMNS
    row = _put(row, tl.sum(total, 0), batch_count)
    row = _put(row, policy_sum, batch_count)
    if OFF_POLICY == "none":
        row = _put(row, policy_sum, batch_count)
    else:
        row = _put(row, tl.sum(tl.where(on_policy, policy, 0.0), 0), tl.sum(tl.where(on_policy, w, 0.0), 0))
    row = _put(row, _number(on_policy & (adv > 0.0) & (ratio > ratio_high)), num_on_policy)
    row = _put(row, _number(on_policy & (adv < 0.0) & (ratio < ratio_low)), num_on_policy)
    row = _put(row, _number(on_policy & too_bad), num_on_policy)
    row = _put(row, tl.sum(-log_ratio, 0), num_counted)
    row = _put(row, ratio_sum, num_counted)
    if OFF_POLICY != "none":
        row = _put(row, tl.sum(tl.where(replayed, policy, 0.0), 0), tl.sum(tl.where(replayed, w, 0.0), 0))
        row = _put(row, num_counted - num_on_policy, num_counted)
    row = _put(row, tl.sum(-lp, 0), num_counted)
    if TIS:
        row = _put(row, tl.sum(tl.where(counted, importance, 0.0), 0), num_counted)
        row = _put(row, _number(counted & (server_ratio > rollout_is_threshold)), num_counted)
    if entropy is not None:
        row = _put(row, tl.sum(h, 0), num_counted)
    if ref_log_probs is not None:
        row = _put(row, tl.sum(weighted_kl, 0), batch_count)
    diff_sum = ratio_sum
    if MISMATCH:
        compared = counted
        if is_current is not None:
            compared = tl.load(is_current + token, mask=counted, other=0) != 0
        num_compared = _number(compared)
        diff = tl.where(compared, old - rollout, 0.0)
        weight = tl.where(compared, tl.exp(_clamped(diff)), 0.0)
        diff_sum = tl.sum(tl.abs(diff), 0)
        row = _put(row, tl.sum(-diff, 0), num_compared)
        row = _put(row, tl.sum(_exp_minus_1_minus(_clamped(diff)), 0), num_compared)
        row = _put(row, diff_sum, num_compared)
        row = _put(row, tl.sum(weight, 0), num_compared)
        row = _put(row, tl.sum(weight * weight, 0), num_compared)
    tl.store(row, _largest(tl.where(counted, ratio, 0.0), ratio_sum).to(tl.float64))
    if MISMATCH:
        tl.store(row + 1, _largest(tl.abs(diff), diff_sum).to(tl.float64))


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
    return tl.where(x > LARGEST_LOG_RATIO, LARGEST_LOG_RATIO, tl.where(x < -LARGEST_LOG_RATIO, -LARGEST_LOG_RATIO, x))


@triton.jit
def _clipped(ratio, adv, low, high, dual):
    """The clipped loss, its derivative by the log of the ratio, and where the dual clip acts."""
    free = -adv * ratio
    bounded = -adv * tl.where(ratio > high, high, tl.where(ratio < low, low, ratio))
    is_free = free >= bounded
    too_bad = (adv < 0.0) & (ratio > dual)
    loss = tl.where(too_bad, -adv * dual, tl.where(is_free, free, bounded))
    return loss, tl.where(is_free & (too_bad == 0), free, 0.0), too_bad


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


@triton.jit
def _largest(values, total):
    return tl.where(total != total, total, tl.max(values, 0))


@triton.jit
def _put(row, total, number):
    """Stores a (sum, count) and returns where the next goes."""
    tl.store(row, total.to(tl.float64))
    tl.store(row + 1, number.to(tl.float64))
    return row + 2
