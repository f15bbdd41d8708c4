"""The CPU stand-in of torch_memory_saver: a region's storages lose their memory and come back
without their contents."""

import gc

import pytest
import torch

from megatron_dapo.platform.cpu_ledger import CpuLedger
from tests.unit.test_sglang_cpu import load_plug_in

pytestmark = pytest.mark.unit

memory_saver = load_plug_in("memory_saver")


@pytest.fixture
def saver():
    return memory_saver.CpuMemorySaver()


def test_what_was_made_in_a_region_goes_and_comes_back_as_garbage(saver):
    outside = torch.ones(3)
    with saver.region("weights"):
        weight = torch.ones(4, dtype=torch.bfloat16)
        derived = weight.float() * 2
        view = derived[1:]
        number = torch.arange(3)
        changed = outside.add_(1)
    saver.pause("weights")
    for tensor in (weight, derived, view, number):
        assert tensor.untyped_storage().nbytes() == 0
    assert torch.equal(changed, torch.full((3,), 2.0))
    saver.resume("weights")
    assert all(tensor.isnan().all() for tensor in (weight, derived, view))
    assert not torch.equal(number, torch.arange(3))
    weight.fill_(5)
    assert torch.equal(weight.float(), torch.full((4,), 5.0))


def test_tags_go_and_come_by_themselves(saver):
    with saver.region("weights"):
        weight = torch.ones(4)
    with saver.region("kv_cache"):
        cache = torch.ones(4)
    with saver.region("weights"):  # of another adapter
        second = torch.ones(2)
    for tag in ("kv_cache", "cuda_graph", "weights"):
        saver.pause(tag)
    saver.resume("weights")
    assert weight.isnan().all() and second.isnan().all() and cache.untyped_storage().nbytes() == 0
    saver.resume("kv_cache")
    saver.resume("cuda_graph")
    assert cache.isnan().all()


def test_a_second_pause_changes_nothing(saver):
    with saver.region("weights"):
        weight = torch.ones(4)
    saver.pause("weights")
    saver.pause("weights")
    saver.resume("weights")
    assert weight.untyped_storage().nbytes() == 16 and weight.isnan().all()


def test_what_cannot_be_resized_is_poisoned(saver):
    with saver.region("weights"):
        weight = torch.ones(4)
    weight.numpy()
    saver.pause("weights")
    assert weight.isnan().all()
    weight.fill_(1)
    saver.resume("weights")
    assert torch.equal(weight, torch.ones(4))  # as it was never away


def test_the_ledger_shows_what_is_awake(saver, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER", str(tmp_path))
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER_GPUS", "3")
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER_BYTES", "100")
    ledger = CpuLedger(tmp_path / "gpu3.jsonl", 100)
    with saver.region("weights"):
        weights = [torch.ones(4), torch.ones(6)]
        (weights[0] + 1).sum()  # in passing
    gc.collect()
    assert ledger.held() == {"server": 40}
    weights[1].numpy()
    saver.pause("weights")
    assert ledger.free_bytes() == 100
    ledger.take("trainer", 61, "weights")
    with pytest.raises(MemoryError, match="server needs 40 bytes for weights.*trainer 61"):
        saver.resume("weights")
    assert weights[0].untyped_storage().nbytes() == 0
    ledger.give("trainer", 1, "weights")
    saver.resume("weights")
    assert ledger.held() == {"server": 40, "trainer": 60}


def test_without_the_option_sglangs_own_adapter_is_made():
    assert memory_saver.create(lambda enable: ("own", enable), False) == ("own", False)
    adapter = memory_saver.create(None, True)
    assert adapter.enabled and memory_saver.create(None, True) is adapter  # one for all pools
    with adapter.configure_subprocess(), adapter.disable(), adapter.cuda_graph(graph=None):
        adapter.check_validity("release_memory_occupation")
