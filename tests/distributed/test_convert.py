"""Hugging Face -> Megatron -> Hugging Face gives back the files, with any layouts in between."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.families import converted_models
from tests.forked_ranks import run_ranks
from tests.helpers import REPOSITORY, run_torchrun
from tests.proofs import PROOFS
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

MODELS = converted_models()
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
CHECKED = {
    "qwen2_bf16_files": "tp2",
    "qwen3_tied_bf16_files": "pp2",
    "qwen3_moe_bf16_files": "tp2",
    "glm4_moe_bf16_files": "pp2",
    "glm4_moe_lite_bf16_files": "tp2",
}
# how many processes, written at, read back at
ROUTES = {"tp1": "tp2", "tp2": "pp2", "pp2": "tp1"}
# each checkpoint goes one way, all of them in proofs; that of one process is verified as well
WAYS = {
    model: [layout for i, layout in enumerate(LAYOUTS) if PROOFS or i == number % 3 or (i == 0 and model in CHECKED)]
    for number, model in enumerate(MODELS)
}


def make_source(folder: Path, name: str, options: dict) -> Path:
    from transformers import AutoModelForCausalLM

    path = make_tiny(folder / name, **{"layers": 4, "hidden": 64, **options})
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="120KB" if "files" in name else "1GB")
    assert (len(list(path.glob("*.safetensors"))) > 2) == ("files" in name)
    return path


def sizes(layout: str) -> list[str]:
    tp, pp = LAYOUTS[layout]
    return ["--tp", str(tp), "--pp", str(pp)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """NAME: sources; NAME-LAYOUT: Megatron; NAME-LAYOUT-hf: back again, by another layout."""
    folder = tmp_path_factory.mktemp("convert")
    for name, options in MODELS.items():
        make_source(folder, name, options)

    def forth(layout: str) -> list:
        return [
            ["hf_to_megatron", ["--hf-model", f"{folder}/{m}", "--output", f"{folder}/{m}-{layout}", *sizes(layout)]]
            for m in MODELS
            if layout in WAYS[m]
        ]

    def back(written: str) -> list:
        return [
            ["megatron_to_hf", ["--checkpoint", f"{folder}/{m}-{written}", "--output", f"{folder}/{m}-{written}-hf",
                                *sizes(ROUTES[written])]]
            for m in MODELS
            if written in WAYS[m]
        ]  # fmt: skip

    checks = [
        ["verify_checkpoint", ["--checkpoint", f"{folder}/{m}-tp1", "--hf-model", f"{folder}/{m}", "--num-tokens",
                               "700", "--round-trip", *sizes(layout)]]
        for m, layout in CHECKED.items()
    ]  # fmt: skip
    runs = [
        (1, forth("tp1")),
        (2, [*forth("tp2"), *forth("pp2"), *back("tp1"), *back("tp2"), *checks]),
        (1, back("pp2")),
    ]
    for number, (num_processes, commands) in enumerate(runs):
        task = folder / f"task{number}.json"
        task.write_text(json.dumps(commands))
        said = run_ranks(Path(__file__).with_name("convert_worker.py"), num_processes, str(task))
        assert said.count(": 0\n") == len(commands), said
    return folder


@pytest.mark.parametrize(("model", "written"), [(model, way) for model, ways in WAYS.items() for way in ways])
def test_the_files_come_back_to_the_byte(folder, model, written):
    source, result = folder / model, folder / f"{model}-{written}-hf"
    names = {path.name for path in source.iterdir()}
    assert names == {path.name for path in result.iterdir()}
    different = [name for name in names if (source / name).read_bytes() != (result / name).read_bytes()]
    assert not different


@pytest.mark.parametrize("model", MODELS)
def test_the_library_of_safetensors_reads_the_result(folder, model):
    """With the library's own reader, in case ours and our writer agree on a mistake."""
    source, result = folder / model, folder / f"{model}-{WAYS[model][-1]}-hf"
    files = list(source.glob("*.safetensors"))
    assert files
    for path in files:
        with safe_open(path, "pt") as a, safe_open(result / path.name, "pt") as b:
            assert sorted(a.keys()) == sorted(b.keys())
            assert all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in a.keys())


def test_a_failure_on_several_processes_is_one_sentence_and_leaves_nothing(folder, tmp_path):
    with pytest.raises(AssertionError) as failure:
        run_torchrun(
            REPOSITORY / "checkpoints_tools" / "hf_to_megatron.py", 2,
            "--hf-model", f"{folder}/llama_files", "--output", str(tmp_path / "out"), "--pp", "1", "--tp", "1",
        )  # fmt: skip
    ranks = str(failure.value).split("--- rank ")[1:]  # torchrun's output comes first
    assert len(ranks) == 1 and "Traceback" not in ranks[0]
    assert "--tp 1 x --pp 1 is 1 processes, but 2 were started" in ranks[0]
    assert not list(tmp_path.iterdir())
