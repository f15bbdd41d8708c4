"""The matrix product with statistics, interpreted, against float64 log_softmax of the same half-precision inputs."""

import pytest
import torch

from megatron_dapo.kernels.statistics import merge
from megatron_dapo.kernels.triton_ops import linear_stats
from megatron_dapo.kernels.triton_ops.linear_stats import linear_statistics
from megatron_dapo.kernels.tuning import LinearTiles

pytestmark = pytest.mark.unit

TILES = LinearTiles(block_m=32, block_n=128, block_k=64, num_warps=8, num_stages=4, group_m=2, tiles_per_split=2)
EPS = torch.finfo(torch.float32).eps


def case(n=40, h=72, v=500, dtype=torch.bfloat16, offset=0.0, seed=0):
    """Ragged in every dimension; a common offset of all logits comes in through one exact product."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, h, generator=g) * 0.5, torch.randn(v, h, generator=g) * 0.5
    hidden[:, 0], weight[:, 0] = 1.0, offset
    inv_temperature = 0.5 + torch.rand(n, generator=g)
    targets = torch.randint(0, v, (n,), generator=g)
    targets[0], targets[-1] = 0, v - 1
    return hidden.to(dtype), weight.to(dtype), inv_temperature, targets


def oracle(hidden, weight, inv_temperature, targets):
    log_p = torch.log_softmax((hidden.double() @ weight.double().T) * inv_temperature.double()[:, None], -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [500, 513])
def test_statistics_give_float64_log_prob_and_entropy(dtype, v):
    hidden, weight, inv_temperature, targets = case(v=v, dtype=dtype)
    stats = linear_statistics(hidden, weight, inv_temperature, targets, num_valid=v, want_entropy=True, tiles=TILES)
    assert stats.shape == (-(-v // 256), 40, 4)
    merged = merge(stats)
    log_prob, entropy = oracle(hidden, weight, inv_temperature, targets)
    # |logit| < 16: products of halves are exact, 72 of them are added in float32
    torch.testing.assert_close(merged.log_prob.double(), log_prob, rtol=0, atol=64 * EPS)
    torch.testing.assert_close(merged.entropy.double(), entropy, rtol=0, atol=64 * EPS)


@pytest.mark.parametrize("offset", [-1000.0, -120.0, 1000.0])
def test_a_common_offset_costs_no_more_than_its_own_rounding(offset):
    hidden, weight, inv_temperature, targets = case(n=32, v=300, offset=offset)
    merged = merge(
        linear_statistics(hidden, weight, inv_temperature, targets, num_valid=300, want_entropy=True, tiles=TILES)
    )
    log_prob, entropy = oracle(hidden, weight, inv_temperature, targets)
    bound = 72 * EPS * abs(offset)  # each of 72 additions may round at the offset's size
    torch.testing.assert_close(merged.log_prob.double(), log_prob, rtol=0, atol=bound)
    # a product's 72 additions round each logit on its own: some roundings of the offset's size remain in a mean of them
    torch.testing.assert_close(merged.entropy.double(), entropy, rtol=0, atol=4 * EPS * abs(offset) + 64 * EPS)


@pytest.mark.parametrize("num_valid", [1, 255, 256, 257, 499])
def test_columns_that_are_padding_have_no_share(num_valid):
    hidden, weight, inv_temperature, targets = case(n=8)
    weight[num_valid:] = 100.0
    targets = targets.clamp_max(num_valid - 1)
    merged = merge(
        linear_statistics(hidden, weight, inv_temperature, targets, num_valid=num_valid, want_entropy=True, tiles=TILES)
    )
    log_prob, entropy = oracle(hidden, weight[:num_valid], inv_temperature, targets)
    torch.testing.assert_close(merged.log_prob.double(), log_prob, rtol=0, atol=64 * EPS)
    torch.testing.assert_close(merged.entropy.double(), entropy, rtol=0, atol=64 * EPS)


def test_a_row_has_the_same_bits_in_any_company():
    hidden, weight, inv_temperature, targets = case(n=70, v=300)
    whole = linear_statistics(hidden, weight, inv_temperature, targets, num_valid=300, want_entropy=True, tiles=TILES)
    for rows in (slice(0, 1), slice(33, 65), torch.arange(69, 0, -7)):
        part = linear_statistics(
            hidden[rows], weight, inv_temperature[rows], targets[rows], num_valid=300, want_entropy=True, tiles=TILES
        )
        assert torch.equal(part, whole[:, rows])


def test_the_number_of_programs_changes_no_bit(monkeypatch):
    arguments = case(n=70, v=300)
    runs = []
    for num_programs in (1, 4, 100):
        monkeypatch.setattr(linear_stats, "_num_programs", lambda device, n=num_programs: n)
        runs.append(linear_statistics(*arguments, num_valid=300, want_entropy=True, tiles=TILES))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_without_entropy_the_other_statistics_are_the_same_bits():
    arguments = case(n=8)
    wanted = linear_statistics(*arguments, num_valid=500, want_entropy=True, tiles=TILES)
    without = linear_statistics(*arguments, num_valid=500, want_entropy=False, tiles=TILES)
    assert torch.equal(wanted[..., [0, 1, 3]], without[..., [0, 1, 3]]) and (without[..., 2] == 0).all()


def test_a_certain_token_has_a_log_prob_of_zero():
    hidden = torch.eye(8, dtype=torch.bfloat16) * 30
    merged = merge(
        linear_statistics(hidden, hidden, torch.ones(8), torch.arange(8), num_valid=8, want_entropy=True, tiles=TILES)
    )
    assert (merged.log_prob == 0).all() and (merged.entropy == 0).all()


def test_shares_of_a_vocabulary_merge_to_the_whole_and_targets_of_other_ranks_are_nobodys():
    hidden, weight, inv_temperature, targets = case(n=16, v=512)
    halves = [
        linear_statistics(hidden, part, inv_temperature, targets - first, num_valid=256, want_entropy=True, tiles=TILES)
        for first, part in ((0, weight[:256]), (256, weight[256:]))
    ]
    whole = linear_statistics(hidden, weight, inv_temperature, targets, num_valid=512, want_entropy=True, tiles=TILES)
    assert torch.equal(torch.cat(halves), whole)
    assert torch.equal(halves[0][0, :, 3].isfinite(), targets < 256)


def test_targets_far_outside_are_nobodys():
    hidden, weight, inv_temperature, _ = case(n=4, v=300)
    targets = torch.tensor([-1, 300, 2**32 + 5, -(2**32) + 5])  # the last two are 5 in 32 bits
    stats = linear_statistics(hidden, weight, inv_temperature, targets, num_valid=300, want_entropy=False, tiles=TILES)
    assert (stats[..., 3] == float("-inf")).all()


def test_no_more_columns_are_valid_than_there_are():
    arguments = case(n=4, v=300)
    all_of_them = linear_statistics(*arguments, num_valid=300, want_entropy=True, tiles=TILES)
    assert torch.equal(linear_statistics(*arguments, num_valid=10**6, want_entropy=True, tiles=TILES), all_of_them)


def test_no_rows_or_no_columns_launch_nothing():
    hidden, weight, inv_temperature, targets = case(n=3)
    none = linear_statistics(hidden, weight, inv_temperature, targets, num_valid=-7, want_entropy=True)
    inf = float("inf")
    assert none.tolist() == [[[-inf, 0.0, 0.0, -inf]] * 3]
    empty = linear_statistics(
        hidden[:0], weight, inv_temperature[:0], targets[:0], num_valid=500, want_entropy=True, tiles=TILES
    )
    assert empty.shape[1:] == (0, 4) and merge(empty).log_prob.shape == (0,)


def test_what_the_tensor_cores_or_tma_cannot_read_is_refused():
    hidden, weight, inv_temperature, targets = case(n=3)
    with pytest.raises(ValueError, match="multiple of 8"):
        linear_statistics(hidden[:, :70], weight[:, :70], inv_temperature, targets, num_valid=500, want_entropy=True)
    for bad in ((hidden.float(), weight.float()), (hidden.half(), weight)):
        with pytest.raises(ValueError, match="half-precision"):
            linear_statistics(*bad, inv_temperature, targets, num_valid=500, want_entropy=True)
