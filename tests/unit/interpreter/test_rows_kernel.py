"""The kernels over rows of logits, interpreted, against float64 log_softmax."""

import inspect

import pytest
import torch

from megatron_dapo.kernels.statistics import merge
from megatron_dapo.kernels.triton_ops import rows
from megatron_dapo.kernels.triton_ops.rows import KLTerms, row_divergence, row_gradient, row_statistics
from megatron_dapo.kernels.tuning import RowTiles

pytestmark = pytest.mark.unit

TILES = RowTiles(block_v=512, num_warps=8)
EPS = torch.finfo(torch.float32).eps


def case(n=13, v=1000, dtype=torch.float32, offset=0.0, seed=0):
    """logits in a view with a row stride of its own, temperatures per row, targets with both edges
    of the shard."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(n, v + 24, generator=g) * 4 + offset
    inv_temperature = 0.5 + torch.rand(n, generator=g)
    targets = torch.randint(0, v, (n,), generator=g)
    targets[0], targets[-1] = 0, v - 1
    return wide.to(dtype)[:, 3 : v + 3], inv_temperature, targets


def oracle(logits, inv_temperature, targets):
    """float64 log-prob and entropy; -inf logits have no share in the entropy."""
    log_p = torch.log_softmax(logits.double() * inv_temperature.double()[:, None], -1)
    entropy = -torch.where(log_p == float("-inf"), 0.0, log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def oracle_gradient(logits, inv_temperature, targets, g_lp, g_h):
    x = logits.double().requires_grad_()
    log_prob, entropy = oracle(x, inv_temperature, targets)
    value = log_prob @ g_lp.double()
    return torch.autograd.grad(value if g_h is None else value + entropy @ g_h.double(), x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [512, 1000, 1537])
def test_statistics_give_float64_log_prob_and_entropy(dtype, v):
    logits, inv_temperature, targets = case(v=v, dtype=dtype)
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    log_prob, entropy = oracle(logits, inv_temperature, targets)
    # |x - M| < 64: its own rounding, and that of a sum of 1000 terms, pairwise inside a block
    torch.testing.assert_close(merged.log_prob.double(), log_prob, rtol=0, atol=64 * EPS)
    torch.testing.assert_close(merged.entropy.double(), entropy, rtol=0, atol=64 * EPS)


@pytest.mark.parametrize("offset", [-1000.0, -120.0, 1000.0])
def test_a_common_offset_costs_no_more_than_its_own_rounding(offset):
    logits, inv_temperature, targets = case(offset=offset)
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    log_prob, entropy = oracle(logits, inv_temperature, targets)
    # a logit times a temperature below 1.5, rounded once, in x_t and in M
    bound = 4 * EPS * (abs(offset) * 1.5 + 64)
    torch.testing.assert_close(merged.log_prob.double(), log_prob, rtol=0, atol=bound)
    # an entropy taken as lse - u / s, without differences to the maximum,
    # would be off by 2e-4 and more
    torch.testing.assert_close(merged.entropy.double(), entropy, rtol=0, atol=1e-4)


def test_without_entropy_the_other_statistics_are_the_same_bits():
    arguments = case()
    wanted = row_statistics(*arguments, want_entropy=True, tiles=TILES)
    without = row_statistics(*arguments, want_entropy=False, tiles=TILES)
    assert torch.equal(wanted[:, [0, 1, 3]], without[:, [0, 1, 3]]) and (without[:, 2] == 0).all()


def test_a_certain_token_has_a_log_prob_of_zero_and_no_entropy():
    logits = torch.full((3, 700), -300.0)
    logits[[0, 1, 2], [0, 600, 699]] = 300.0
    targets = torch.tensor([0, 600, 699])
    merged = merge(row_statistics(logits, torch.ones(3), targets, want_entropy=True, tiles=TILES)[None])
    assert (merged.log_prob == 0).all() and (merged.entropy == 0).all()
    out = torch.empty_like(logits)
    row_gradient(logits, torch.ones(3), targets, merged, torch.ones(3), torch.ones(3), out, tiles=TILES)
    assert (out == 0).all()


def test_blocks_and_rows_of_nothing_but_minus_infinity():
    """A first block without any finite logit, and a share without a valid column,
    as on a rank of padding."""
    logits, inv_temperature, targets = case(n=3)
    logits[:, :600] = float("-inf")
    targets = targets.clamp(600)
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    log_prob, entropy = oracle(logits, inv_temperature, targets)
    torch.testing.assert_close(merged.log_prob.double(), log_prob, rtol=0, atol=64 * EPS)
    torch.testing.assert_close(merged.entropy.double(), entropy, rtol=0, atol=64 * EPS)
    inf = float("inf")
    for width in (0, 600):
        share = row_statistics(logits[:, :width], inv_temperature, targets, want_entropy=True, tiles=TILES)
        assert share.tolist() == [[-inf, 0.0, 0.0, -inf]] * 3


def test_targets_of_other_ranks_are_not_read():
    logits, inv_temperature, _ = case(n=4)
    stats = row_statistics(logits, inv_temperature, torch.tensor([-1, 1000, -(2**40), 2**40]), want_entropy=False)
    assert (stats[:, 3] == float("-inf")).all() and stats[:, 0].isfinite().all()


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
def test_gradient_is_that_of_float64(with_entropy, dtype, out_dtype):
    logits, inv_temperature, targets = case(dtype=dtype)
    g_lp, g_h = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(1))
    g_h = g_h if with_entropy else None
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=with_entropy, tiles=TILES)[None])
    out = torch.empty(logits.shape, dtype=out_dtype)
    row_gradient(logits, inv_temperature, targets, merged, g_lp, g_h, out, tiles=TILES)
    expected = oracle_gradient(logits, inv_temperature, targets, g_lp, g_h)
    # an element is a difference of terms near 1; a float32 probability is right
    # to |log p| < 64 roundings
    rounding = torch.finfo(out_dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=64 * EPS)


@pytest.mark.parametrize("v", [5, 600, 1024])
def test_logits_of_minus_infinity_have_no_gradient(v):
    logits, inv_temperature, targets = case(n=4, v=v)
    logits[:, : v // 2] = float("-inf")
    targets = targets.clamp(v // 2)
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    out = torch.empty_like(logits)
    row_gradient(logits, inv_temperature, targets, merged, torch.ones(4), torch.ones(4), out, tiles=TILES)
    assert (out[:, : v // 2] == 0).all()
    rest = oracle_gradient(logits[:, v // 2 :], inv_temperature, targets - v // 2, torch.ones(4), torch.ones(4))
    torch.testing.assert_close(out[:, v // 2 :].double(), rest, rtol=EPS, atol=64 * EPS)


def test_a_row_with_one_of_the_two_gradients_counts():
    logits, inv_temperature, targets = case(n=4)
    g_lp, g_h = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    out = torch.empty_like(logits)
    row_gradient(logits, inv_temperature, targets, merged, g_lp, g_h, out, tiles=TILES)
    expected = oracle_gradient(logits, inv_temperature, targets, g_lp, g_h)
    torch.testing.assert_close(out.double(), expected, rtol=EPS, atol=64 * EPS)
    assert (out[2] == 0).all()


@pytest.mark.parametrize("v", [5, 600, 1024])
def test_the_kl_to_other_rows_and_its_gradient_are_those_of_float64(v):
    """One row without any incoming gradient, one with only the KL's;
    a column absent from both models."""
    logits, inv_temperature, targets = case(n=4, v=v)
    other = case(n=4, v=v, seed=1)[0].clone()
    logits[:, 1], targets[0] = float("-inf"), 0
    p, q = (
        merge(row_statistics(x, inv_temperature, targets, want_entropy=False, tiles=TILES)[None])
        for x in (logits, other)
    )
    x = logits.double().requires_grad_()
    scale = inv_temperature.double()[:, None]
    log_p, log_q = (x * scale).log_softmax(-1), (other.double() * scale).log_softmax(-1)
    expected = torch.where(log_p.isinf(), 0.0, log_p.exp() * (log_p.clamp_min(-1e30) - log_q)).sum(-1)
    kl = row_divergence(logits, other, inv_temperature, p, q, tiles=TILES)
    torch.testing.assert_close(kl.double(), expected.detach(), rtol=64 * EPS, atol=64 * EPS)
    g_lp, g_kl = torch.tensor([1.0, 0.0, 0.0, -0.5]), torch.tensor([0.3, 0.0, 2.0, 1.0])
    out = torch.empty_like(logits)
    row_gradient(logits, inv_temperature, targets, p, g_lp, None, out, kl=KLTerms(other, kl, g_kl), tiles=TILES)
    value = expected @ g_kl.double() + log_p.gather(1, targets[:, None])[:, 0] @ g_lp.double()
    (gradient,) = torch.autograd.grad(value, x)
    # terms p (log p - log q - KL), with log-probs up to 64 in size, right to 64 roundings
    torch.testing.assert_close(out.double(), gradient.nan_to_num(0.0), rtol=EPS, atol=256 * EPS)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_in_place_is_the_gradient(dtype):
    logits, inv_temperature, targets = case(dtype=dtype)
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    g_lp, g_h = torch.randn(4, len(targets))[::2]
    apart = torch.full(logits.shape, float("nan"), dtype=dtype)
    row_gradient(logits, inv_temperature, targets, merged, g_lp, g_h, apart, tiles=TILES)
    neighbours = logits._base[:, :3].clone(), logits._base[:, 1003:].clone()
    row_gradient(logits, inv_temperature, targets, merged, g_lp, g_h, logits, tiles=TILES)
    assert torch.equal(logits, apart)
    assert torch.equal(logits._base[:, :3], neighbours[0]) and torch.equal(logits._base[:, 1003:], neighbours[1])


def test_gradients_of_any_stride_are_understood():
    logits, inv_temperature, targets = case()
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    g = torch.randn(len(targets), 2)
    expanded = torch.ones(1).expand(len(targets))
    strided, dense = torch.empty_like(logits), torch.empty_like(logits)
    row_gradient(logits, inv_temperature, targets, merged, g[:, 0], expanded, strided, tiles=TILES)
    row_gradient(logits, inv_temperature, targets, merged, g[:, 0].clone(), expanded.clone(), dense, tiles=TILES)
    assert torch.equal(strided, dense)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_that_does_not_count_is_zero_even_if_it_is_not_a_number():
    logits, inv_temperature, targets = case(n=3)
    logits[1] = float("nan")
    merged = merge(row_statistics(logits, inv_temperature, targets, want_entropy=True, tiles=TILES)[None])
    wide = torch.full((3, 1100), 7.0)
    out = wide[:, :1000]
    g = torch.tensor([1.0, 0.0, 1.0])
    row_gradient(logits, inv_temperature, targets, merged, g, g, out, tiles=TILES)
    assert (out[1] == 0).all() and out.isfinite().all() and (out[[0, 2]] != 0).any(1).all()
    assert (wide[:, 1000:] == 7).all()
    assert merged.log_prob[1].isnan(), "a row that is not a number must not look like one"


def test_no_rows_launch_nothing():
    logits, inv_temperature, targets = (t[:0] for t in case())
    stats = row_statistics(logits, inv_temperature, targets, want_entropy=True)
    assert stats.shape == (0, 4)
    empty = torch.empty(0)
    row_gradient(logits, inv_temperature, targets, merge(stats[None]), empty, empty, logits)


def test_rows_are_found_by_64_bit_offsets():
    """32768 rows of a whole vocabulary do not fit here; the source stands in for them."""
    for kernel in (rows.row_statistics_kernel, rows.row_gradient_kernel):
        source = inspect.getsource(kernel.fn)
        assert "row = tl.program_id(0).to(tl.int64)" in source and "row * row_stride" in source


def test_transposed_logits_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        row_statistics(torch.zeros(4, 3).t(), torch.ones(3), torch.zeros(3, dtype=torch.int64), want_entropy=False)
