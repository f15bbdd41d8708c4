"""The merge of the ranks' statistics: float64's numbers, and bits independent of the company."""

import pytest
import torch

from megatron_dapo.kernels.statistics import merge

pytestmark = pytest.mark.unit


def shares(num_shares: int, num_rows: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """(statistics [R, N, 4] of rows cut into equal shares, the rows [N, R * 40]);
    the target is column 3."""
    g = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(num_rows, num_shares, 40, generator=g, dtype=torch.float64)
    m = x.amax(-1)
    e = (x - m[..., None]).exp()
    x_t = torch.full_like(m, float("-inf"))
    x_t[:, 0] = x[:, 0, 3]
    stats = torch.stack([m, e.sum(-1), ((x - m[..., None]) * e).sum(-1), x_t], dim=-1)
    return stats.transpose(0, 1).contiguous().to(dtype), x.flatten(1)


@pytest.mark.parametrize("num_shares", [1, 2, 8, 33])
def test_merged_shares_are_log_softmax_and_entropy(num_shares):
    stats, x = shares(num_shares, 50, torch.float64)
    merged, log_p = merge(stats), torch.log_softmax(x, -1)
    torch.testing.assert_close(merged.log_prob, log_p[:, 3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.entropy, -(log_p.exp() * log_p).sum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_shares", [2, 8, 16, 33])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 24, 63])
def test_a_rows_bits_do_not_depend_on_how_many_are_merged_with_it(num_shares, num_rows):
    stats, _ = shares(num_shares, 64)
    whole, part = merge(stats), merge(stats[:, :num_rows].contiguous())
    for name in whole._fields:
        assert torch.equal(getattr(part, name), getattr(whole, name)[:num_rows]), name


def test_a_share_without_columns_changes_nothing():
    stats, _ = shares(2, 5)
    nothing = torch.tensor([float("-inf"), 0.0, 0.0, float("-inf")]).expand(1, 5, 4)
    for actual, expected in zip(merge(torch.cat([stats, nothing])), merge(stats), strict=True):
        assert torch.equal(actual, expected)
