"""The table of block sizes: production sizes have rows of their own, all others a safe one."""

import json

import pytest
import torch

from megatron_dapo.kernels import tuning

pytestmark = pytest.mark.unit

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# one rank's share of the vocabulary: 0.5B; 7B; 7B at TP 4; 32B at TP 8
PRODUCTION = [151936, 152064, 38016, 19008]


def rows():
    return json.loads(tuning.TABLE.read_text())["shapes"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("vocabulary", PRODUCTION)
def test_every_production_size_has_a_row(arch, vocabulary):
    assert any(row["architecture"] == arch and vocabulary <= row["max_vocabulary"] for row in rows())


def test_the_smallest_row_that_covers_a_vocabulary_is_taken():
    for arch in ARCHITECTURES:
        sizes = [row["max_vocabulary"] for row in rows() if row["architecture"] == arch]
        assert sizes == sorted(sizes)
    assert tuning.lookup("sm_90", 19008).block_v == 4096
    assert tuning.lookup("sm_90", 152064).block_v == 8192


@pytest.mark.parametrize("size", [("sm_120", 19008), ("cpu", 100), ("sm_90", 10**7)])
def test_what_the_table_does_not_name_gets_the_default(size):
    assert tuning.lookup(*size) == tuning.default()


def test_sizes_are_valid_for_triton():
    for row in [json.loads(tuning.TABLE.read_text())["default"], *rows()]:
        assert all(size & (size - 1) == 0 for size in (row["block_v"], row["num_warps"]))
        assert row["block_v"] >= 128 * row["num_warps"], "four numbers per thread are one wide load"


def test_a_processor_without_a_row_of_its_own_has_a_name():
    assert tuning.architecture(torch.device("cpu")) == "cpu"


def test_generations_share_a_row_across_minor_versions(monkeypatch):
    for capability, name in (((8, 6), "sm_80"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 0), "sm_120")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert tuning.architecture.__wrapped__(torch.device("cuda")) == name
