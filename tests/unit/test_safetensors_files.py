"""Our reader and writer of .safetensors files, beside the safetensors library itself."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.models.file_plan import FilePlan
from megatron_dapo.models.safetensors_files import FileWriter, SafetensorsFolder, StoredFile, TensorSpec, file_order
from megatron_dapo.models.weight_map import SAME, Entry

pytestmark = pytest.mark.unit


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"b.weight": (7, 6), "a.weight": (10, 3), "a.bias": (5,), "a.wéight": (2, 2)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(path, contents: dict[str, torch.Tensor], metadata) -> None:
    specs = file_order(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in contents.items())
    writer = FileWriter(path, specs, metadata)
    for spec in specs:
        writer.write(contents[spec.name])
    writer.finish()
    writer.close()


def test_a_written_tensor_can_still_be_parked(tmp_path):
    contents = tensors(torch.float32) | {"empty": torch.empty(0, 3)}
    write(tmp_path / "file", contents, {"format": "pt"})
    assert all(tensor.untyped_storage().resizable() for tensor in contents.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_has_the_bytes_that_the_library_writes(tmp_path, dtype):
    contents = tensors(dtype) | {"wide": torch.arange(3, dtype=torch.float64)}
    save_file(contents, tmp_path / "theirs", {"format": "pt"})
    write(tmp_path / "ours", contents, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    write(tmp_path / "bare", contents, {})
    assert load_file(tmp_path / "bare").keys() == contents.keys()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("name", "dim"), [("b.weight", 0), ("b.weight", 1), ("a.weight", 0), ("a.bias", 0)])
def test_slices_are_those_of_the_tensor(tmp_path, name, dim, size):
    contents = tensors(torch.bfloat16)
    save_file(contents, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        whole = file.get_tensor(name)
    padded = -(-whole.shape[dim] // size) * size
    parts = [folder.read(name, dim, rank, size, padded) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1 or dim == 1
    joined = torch.cat(parts, dim)
    assert torch.equal(joined.narrow(dim, 0, whole.shape[dim]), whole)
    assert not joined.narrow(dim, whole.shape[dim], joined.shape[dim] - whole.shape[dim]).any()
    assert torch.equal(folder.read(name, None), whole)


def test_a_slice_of_several_tensors_in_one_is_that_of_each(tmp_path):
    """As gate and up of GLM-4, or tensors of other heights;
    and all slices are the whole tensor again."""
    blocks = (8, 4, 2)
    whole = torch.arange(28).view(14, 2).float()
    save_file({"qkv": whole}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    slices = [folder.read("qkv", 0, rank, 2, None, blocks) for rank in range(2)]
    assert torch.equal(slices[1], whole[[4, 5, 6, 7, 10, 11, 13]])
    entry = Entry(torch.nn.Parameter(slices[0]), ("qkv",), SAME, 0, (blocks,))
    assert torch.equal(entry.whole(0, slices), whole)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors(torch.float32), path)
    whole = path.read_bytes()
    for damaged, why in (
        (whole[:-1], "not fully covered"),
        (whole + b"x", "not fully covered"),
        (whole[:20], "header"),
        (b"", "header too small"),
        (b"<html>not found</html>" * 9, "header too large"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"model.safetensors` is not a safetensors file, or damaged \(.*{why}"):
            StoredFile.read(path)
    path.unlink()
    with pytest.raises(UserError, match=r"model.safetensors` cannot be read \(No such file or directory\)"):
        StoredFile.read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["b.weight"].update(data_offsets=header["a.weight"]["data_offsets"]),  # an overlap
        lambda header: header.pop("a.weight"),  # a gap
        lambda header: header["b.weight"].update(shape=[7, 5]),
        lambda header: header["b.weight"].update(dtype="BF16"),
        lambda header: header["a.bias"].update(shape=[5.0]),
        lambda header: header.update(__metadata__=[1]),
    ],
)
def test_a_header_that_would_give_other_bytes_is_refused(tmp_path, change):
    path = tmp_path / "model.safetensors"
    save_file(tensors(torch.float32), path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])
    with pytest.raises(UserError, match="is not a safetensors file, or damaged"):
        StoredFile.read(path)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    contents = tensors(torch.float32)
    save_file(contents, tmp_path / "a.safetensors")
    save_file({"b.weight": contents["b.weight"] + 1}, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match=r"has b\.weight in several files; keep the right one"):
        SafetensorsFolder(tmp_path)
    index = {"weight_map": dict.fromkeys(contents, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(SafetensorsFolder(tmp_path).names) == set(contents)  # only its files count
    save_file(contents, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has model\.safetensors, which transformers reads, and an index of other"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "inner/model.safetensors", "/model.safetensors", 5])
def test_an_index_may_not_lead_out_of_its_folder(tmp_path, name):
    """A conversion back writes files of the same names."""
    inner = tmp_path / "model"
    (inner / "inner").mkdir(parents=True)
    for path in (tmp_path, inner / "inner"):
        save_file(tensors(torch.float32), path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(torch.float32), name)}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"the index of .* names {name}; put all files into the folder itself"):
        SafetensorsFolder(inner)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": "b"}, "metadata": 5}'])
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="index.json` is not an index of tensors"):
        SafetensorsFolder(tmp_path)


def spec(**changes) -> ModelSpec:
    sizes = dict(num_layers=2, hidden_size=8, ffn_size=12, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=11)
    rest = dict(rotary_dim=4, max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tied_embeddings=False)
    return ModelSpec(**{"family": "Qwen2ForCausalLM", "qkv_bias": True, "qk_norm": False, **sizes, **rest, **changes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_the_tensors_of_a_model_are_those_that_transformers_saves(tmp_path, family, tied):
    from megatron_dapo.huggingface.spec_reader import read_model_spec
    from tests.tiny_models import make_tiny

    path = make_tiny(tmp_path, family, tied=tied, layers=2, vocab=67)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(path / "model.safetensors").items()}
    assert hf_tensors(read_model_spec(path)) == saved


def test_standard_files_are_named_as_transformers_names_them_and_hold_everything_once():
    plan = FilePlan.standard(spec(), torch.bfloat16, file_bytes=600)
    names = [name for tensors in plan.files.values() for name in tensors]
    assert sorted(names) == sorted(hf_tensors(spec()))
    last = len(plan.files)
    assert list(plan.files) == [f"model-{i:05d}-of-{last:05d}.safetensors" for i in range(1, last + 1)] and last > 3
    assert plan.index == {"total_size": plan.num_bytes}
    single = FilePlan.standard(spec(), torch.bfloat16)
    assert list(single.files) == ["model.safetensors"] and single.index is None and single.index_json(1) is None


def test_an_index_of_another_precision_gives_its_own_size():
    plan = FilePlan.standard(spec(), torch.bfloat16, file_bytes=600)
    assert json.loads(plan.index_json(2 * plan.num_bytes))["metadata"]["total_size"] == 2 * plan.num_bytes
