"""The purpose of the benchmarks of checkpoints, held over committed numbers,
and their arithmetic."""

import json

import pytest
import torch
from safetensors import safe_open

from benchmarks.bench_checkpoint import summary
from benchmarks.synthetic_model import ModelSize, write_model
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

RESULTS = REPOSITORY / "benchmarks" / "results"


def committed(name: str) -> dict:
    (result,) = json.loads((RESULTS / name).read_text())["results"]
    return result


def test_converting_3_gb_needs_less_than_two_shards_above_the_model_and_changes_no_byte():
    result = committed("convert_cpu.json")
    assert result["model_bytes"] > 3e9 and result["files_equal_after_round_trip"]
    assert result["bound_bytes"] == result["model_bytes"] + 2 * result["largest_shard_bytes"]
    rows = {row["name"]: row for row in result["rows"]}
    for tool in ("hf_to_megatron", "megatron_to_hf"):
        assert rows[tool]["peak_anonymous"] - rows["start"]["peak_anonymous"] < result["bound_bytes"], tool


def test_a_background_save_stops_training_for_a_tenth_of_what_a_blocking_one_does():
    result = committed("checkpoint_cpu.json")
    assert result["num_bytes"] > 1e9
    assert result["stall_over_blocking"] < 0.1
    assert result["total_over_raw_write"] < 4  # of torch.save's time 1.5 to 3.1 on two machines


def test_ratios_are_of_the_same_round():
    def taken(*totals: float, **phases: list[float]) -> list[dict[str, float]]:
        return [{"total": total, **{k: v[i] for k, v in phases.items()}} for i, total in enumerate(totals)]

    samples = {  # the disk is ten times slower in the second round, and twice in the third
        "raw write": taken(1.0, 10.0, 2.0),
        "torch.save": taken(2.0, 20.0, 4.0),
        "blocking": taken(4.0, 40.0, 8.0, tensors=[3.0, 30.0, 6.0]),
        "background": taken(5.0, 50.0, 10.0, stall=[0.4, 4.0, 0.8], longest=[0.3, 3.0, 0.6]),
    }
    result = summary("x", 10**6, 3, samples)
    assert (result["total_over_raw_write"], result["total_over_torch_save"]) == (4.0, 2.0)
    assert (result["tensors_over_torch_save"], result["stall_over_blocking"]) == (1.5, pytest.approx(0.1))
    assert result["mb_per_s"]["raw write"] == 0.5


def test_the_made_up_model_has_every_tensor_once_in_files_of_the_size_asked_for(tmp_path):
    size = ModelSize(hidden=32, ffn=64, layers=2, vocab=100)
    write_model(tmp_path / "hf", size, torch.bfloat16, shard_bytes=20_000)
    shapes = {}
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert len(files) > 2 and all(path.stat().st_size < 25_000 for path in files)
    assert shapes == dict(size.shapes())
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == shapes.keys()
    assert index["metadata"]["total_size"] == 2 * size.num_values
