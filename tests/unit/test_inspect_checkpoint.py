"""inspect_checkpoint: a folder's tensors as torch wrote them, faults by name,
tensor-wise differences."""

import json
import math
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoints_tools.inspect_checkpoint import main
from checkpoints_tools.tensor_diff import compare
from megatron_dapo.checkpointing.manifest import write_manifest

pytestmark = pytest.mark.unit

STATE = {"step": 3, "weight_version": 3, "config_hash": "abc", "config": {"data": 1}}
COMMON = {"written_with": {"tp": 2, "pp": 1}, "lr_schedule": {"num_steps": 6}}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = {"embedding.weight": (5, 4), "decoder.layers.0.bias": (3,), "optimizer.exp_avg.embedding.weight": (5, 4)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    return made | {"decoder.layers.0.weight": torch.randn(2, 3, generator=generator).bfloat16()}


def make(path: Path, state: dict | None = None, contents=("model", "optimizer")) -> Path:
    """A checkpoint folder, its tensors written by torch."""
    (path / "hf").mkdir(parents=True)
    (path / "hf" / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 4, "torch_dtype": "x"}))
    (path / "trainer.json").write_text(json.dumps(STATE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no process group: on purpose
        dcp.save({**(state or tensors()), "rng": {"states": [1, 2]}}, checkpoint_id=path / "megatron", no_dist=True)
    torch.save({"common": COMMON}, path / "megatron" / "common.pt")
    write_manifest(path, contents, flush=False)
    return path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return make(tmp_path / "step_000003")


def report(capsys, *arguments, code: int = 0) -> dict:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_holds_tensors_state_model_and_manifest(checkpoint, capsys):
    shown = report(capsys, checkpoint, "--verify")
    expected = tensors()
    assert {t["name"]: (tuple(t["shape"]), t["dtype"]) for t in shown["tensors"]} == {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in expected.items()
    }
    assert shown["totals"]["model"]["num_values"] == 5 * 4 + 3 + 2 * 3
    assert shown["totals"]["model"]["num_bytes"] == (5 * 4 + 3) * 4 + 2 * 3 * 2
    assert shown["totals"]["model"]["dtypes"] == {"float32": 2, "bfloat16": 1}
    assert shown["totals"]["optimizer"]["num_tensors"] == 1
    assert shown["objects"] == ["rng.states"]
    assert shown["state"] == {name: value for name, value in STATE.items() if name != "config"}
    assert shown["common"] == COMMON
    assert shown["model"] == {"model_type": "qwen2", "hidden_size": 4}
    assert shown["is_whole"] and shown["contents"] == ["model", "optimizer"] and "torch" in shown["versions"]
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert (shown["num_files"], shown["num_bytes"]) == (len(files), sum(path.stat().st_size for path in files))


def test_the_table_says_the_same_in_words(checkpoint, capsys):
    assert main([str(checkpoint), "--tensors"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "step 3",
        "written with tp 2, pp 1",
        "lr schedule num_steps 6",
        "model model_type qwen2, hidden_size 4",
        "model 3 29 104 B float32 (2), bfloat16 (1)",
        "embedding.weight 5 x 4 float32 80 B 1",
    ):
        assert line in lines, lines
    assert any(line.endswith("all sizes right") for line in lines)


def test_the_folder_inside_is_the_same_checkpoint(checkpoint, capsys):
    inside, outside = report(capsys, checkpoint / "megatron"), report(capsys, checkpoint)
    assert inside | {"path": ""} == outside | {"path": ""}


def test_only_some_tensors(checkpoint, capsys):
    shown = report(capsys, checkpoint, "--only", "decoder.*")
    assert sorted(t["name"] for t in shown["tensors"]) == ["decoder.layers.0.bias", "decoder.layers.0.weight"]
    assert shown["totals"].keys() == {"model"}


def test_damage_is_named_and_is_exit_code_1(checkpoint, capsys):
    (checkpoint / "trainer.json").write_text("{")
    (checkpoint / "stray").write_text("")
    shown = report(capsys, checkpoint, code=1)
    assert any("trainer.json" in text for text in shown["damage"]) and shown["not_in_manifest"] == ["stray"]
    assert main([str(checkpoint)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_a_flipped_bit_is_found_by_verify(checkpoint, capsys):
    path = next((checkpoint / "megatron").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert report(capsys, checkpoint)["is_whole"]  # only sizes
    shown = report(capsys, checkpoint, "--verify", code=1)
    assert path.name in shown["damage"][0]


def test_a_folder_without_a_manifest_is_shown_as_incomplete(checkpoint, capsys):
    (checkpoint / "manifest.json").unlink()
    shown = report(capsys, checkpoint, code=1)
    assert "manifest.json is missing" in shown["damage"][0] and len(shown["tensors"]) == 4


def test_equal_checkpoints_do_not_differ_however_they_were_cut(tmp_path, capsys):
    """Pieces of rows: as two ranks would have written them, each its half."""
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    cut_in_two(b / "megatron", "embedding.weight")
    assert len(report(capsys, b, "--only", "embedding.weight", code=1)["tensors"][0]["pieces"]) == 2
    shown = report(capsys, "--diff", a, b)
    assert shown["equal"] and shown["num_equal"] == 4


def cut_in_two(folder: Path, name: str) -> None:
    """Store the halves of a tensor's rows in files of their own, and index them."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    entry, value = index.state_dict_metadata[name], tensors()[name]
    (key,) = [key for key in index.storage_data if key.fqn == name]
    info, chunk = index.storage_data.pop(key), entry.chunks[0]
    entry.chunks.clear()
    for number, (first, last) in enumerate([(0, 2), (2, value.shape[0])]):
        file = folder / f"__{number + 7}_0.distcp"
        torch.save(value[first:last].clone(), file)
        offset, size = torch.Size([first, 0]), torch.Size([last - first, *value.shape[1:]])
        entry.chunks.append(type(chunk)(offset, size))
        where = type(info)(file.name, 0, file.stat().st_size)
        index.storage_data[type(key)(name, offset, number)] = where
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_a_diff_says_which_tensors_changed_and_by_how_much(tmp_path, capsys):
    changed = tensors()
    changed["embedding.weight"][1, 2] += 0.5
    changed["decoder.layers.0.bias"] = torch.zeros(4)
    changed["new"] = changed.pop("optimizer.exp_avg.embedding.weight")
    a, b = make(tmp_path / "a"), make(tmp_path / "b", changed)
    shown = report(capsys, "--diff", a, b, code=1)
    (change,) = shown["changed"]
    assert (change["name"], change["num_different"], change["num_values"]) == ("embedding.weight", 1, 20)
    assert change["largest"] == pytest.approx(0.5, rel=1e-6)
    assert change["relative"] == pytest.approx(0.5 / tensors()["embedding.weight"].norm().item(), rel=1e-6)
    assert shown["unlike"] == {"decoder.layers.0.bias": ["3 float32", "4 float32"]}
    assert (shown["only_a"], shown["only_b"]) == (["optimizer.exp_avg.embedding.weight"], ["new"])
    assert shown["num_equal"] == 1 and not shown["equal"]
    assert main(["--diff", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert "1 of 20" in text and "only in B: new" in text and "1 tensors equal bit for bit, 1 changed" in text


def test_values_are_compared_bit_for_bit(monkeypatch):
    monkeypatch.setattr("checkpoints_tools.tensor_diff.CHUNK", 2)
    nan = torch.tensor([1.0, float("nan"), 0.0, 4.0, 5.0])
    assert compare("x", nan, nan.clone()) is None
    zero = compare("x", torch.tensor([0.0, 1.0, 2.0]), torch.tensor([-0.0, 1.0, 2.0]))
    assert (zero.num_different, zero.largest) == (1, 0.0)
    gone = compare("x", torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, float("nan")]))
    assert gone.num_different == 1 and math.isnan(gone.largest) and math.isnan(gone.relative)
    far = compare("x", torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 0.0, 0.0]))
    assert (far.num_different, far.largest, far.relative) == (2, 4.0, 1.0)
    half = compare("x", torch.ones(3).bfloat16(), torch.tensor([1.0, 1.0078125, 1.0]).bfloat16())
    assert (half.num_different, half.largest) == (1, 0.0078125)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("absent", "is not a folder here"),
        ("empty", "is no checkpoint: it has no folder megatron"),
        ("no index", "it has no .metadata"),
        ("damaged index", "is damaged"),
        ("index with a flipped bit", "is damaged"),
    ],
)
def test_what_is_no_checkpoint_is_one_sentence_and_exit_code_2(checkpoint, tmp_path, capsys, what, words):
    path = {"absent": tmp_path / "absent", "empty": tmp_path / "empty"}.get(what, checkpoint)
    (tmp_path / "empty").mkdir()
    index = checkpoint / "megatron" / ".metadata"
    if what == "no index":
        index.unlink()
    elif what == "damaged index":
        index.write_bytes(index.read_bytes()[:-20])
    elif what == "index with a flipped bit":
        index.write_bytes(index.read_bytes().replace(b"relative_path", b"relative_patH", 1))
    assert main([str(path)]) == 2
    count, *sentences = capsys.readouterr().err.splitlines()
    assert count == "1 mistake to correct:" and len(sentences) == 1 and words in sentences[0], sentences


def test_a_tensor_that_cannot_be_read_is_named(tmp_path, capsys):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    for path in (b / "megatron").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    assert main(["--diff", str(a), str(b)]) == 2
    assert "cannot be read from" in capsys.readouterr().err


def test_of_many_processes_one_speaks(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main([str(checkpoint)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [[], ["a", "--diff", "b", "c"]])
def test_one_checkpoint_or_two_to_compare(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
