"""The table of block sizes: production shapes have rows of their own, all others get what always fits."""

import json

import pytest
import torch

from megatron_dapo.kernels import tuning

pytestmark = pytest.mark.unit

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# hidden size and one rank's share of the vocabulary: 0.5B; 7B; 7B at TP 4; 32B at TP 8
PRODUCTION = [(896, 151936), (3584, 152064), (3584, 38016), (5120, 19008)]


def rows():
    table = json.loads(tuning.TABLE.read_text())
    return [table["default"], *table["shapes"]]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("hidden_size", "vocabulary"), PRODUCTION)
def test_every_production_shape_has_a_row(arch, hidden_size, vocabulary):
    covered = [r for r in rows()[1:] if r["architecture"] == arch and vocabulary <= r["max_vocabulary"]]
    assert any(hidden_size <= r["max_hidden"] for r in covered)


def test_the_smallest_row_that_covers_a_shape_is_taken():
    for arch in ARCHITECTURES:
        own = [r for r in rows()[1:] if r["architecture"] == arch]
        sizes = [(r["max_hidden"], r["max_vocabulary"]) for r in own]
        assert sizes == sorted(sizes)
    assert tuning.lookup("sm_90", 5120, 19008).linear.tiles_per_split == 5
    assert tuning.lookup("sm_90", 5120, 152064).linear.tiles_per_split == 18


@pytest.mark.parametrize(
    "shape", [("sm_120", 5120, 19008), ("cpu", 64, 100), ("sm_90", 16384, 1000), ("sm_90", 64, 10**7)]
)
def test_what_the_table_does_not_name_gets_the_default(shape):
    assert tuning.lookup(*shape) == tuning.default()


def test_the_default_fits_the_shared_memory_of_every_gpu_since_ampere():
    linear = tuning.default().linear
    operands = 2 * (linear.block_m + linear.block_n) * linear.block_k * linear.num_stages
    assert operands <= 99 * 1024  # sm_86, sm_89 and sm_120 have the least


def test_sizes_are_what_triton_can_take():
    for row in rows():
        assert row["forward"] in ("gemm", "fused")
        sizes = [row["rows"]["block_v"], row["rows"]["num_warps"]]
        sizes += [row["linear"][name] for name in ("block_m", "block_n", "block_k", "num_warps")]
        assert all(size & (size - 1) == 0 for size in sizes)
        assert row["rows"]["block_v"] >= 128 * row["rows"]["num_warps"], "four numbers per thread are one wide load"


def test_a_processor_without_a_row_of_its_own_has_a_name():
    assert tuning.architecture(torch.device("cpu")) == "cpu"


def test_generations_share_a_row_whatever_their_minor_version(monkeypatch):
    for capability, name in (((8, 6), "sm_80"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 0), "sm_120")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert tuning.architecture.__wrapped__(torch.device("cuda")) == name
