"""The text folder of a published Qwen3.5 folder, and the way back: byte for byte, or not at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import text_folder
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.spec_reader import model_spec, read_model_spec
from megatron_dapo.models.hf_io import check_hf_weights
from megatron_dapo.models.safetensors_files import SafetensorsFolder
from tests.tiny_models import make_tokenizer

pytestmark = pytest.mark.unit

INDEX = "model.safetensors.index.json"
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
DENSE = {"intermediate_size": 48}
MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def published(path: Path, is_mixture: bool = False, num_files: int = 3) -> Path:
    """Write a folder as it is published: several files, experts in stacks, images, a layer that
    predicts more tokens, a tokenizer, and other files."""
    import transformers

    kind = "Qwen3_5Moe" if is_mixture else "Qwen3_5"
    text = TEXT | (MIXTURE if is_mixture else DENSE)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=VISION)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).bfloat16()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors |= {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.randn(32)}
    path.mkdir()
    config.architectures = [f"{kind}ForConditionalGeneration"]
    config.save_pretrained(path)
    content = json.loads((path / "config.json").read_text())
    content["text_config"] |= {"full_attention_interval": 4, "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(content, indent=4))
    make_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text("{}")
    write_files(path, tensors, num_files)
    return path


def write_files(path: Path, tensors: dict[str, torch.Tensor], num_files: int) -> None:
    """Write tensors to files in turns, so that text and images share files."""
    names = sorted(tensors)
    files = {f"model-{number}.safetensors": names[number::num_files] for number in range(num_files)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, path / file, {"format": "pt"})
    weight_map = {name: file for file, own in files.items() for name in own}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1, "by": "hand"}, "weight_map": weight_map}))


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def all_bytes(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "mixture"])
def image(request, tmp_path_factory) -> Path:
    return published(tmp_path_factory.mktemp("published") / "image", request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return published(tmp_path_factory.mktemp("dense") / "image")


@pytest.fixture
def text(image, tmp_path) -> Path:
    assert text_folder.main([str(image), str(tmp_path / "text")]) == 0
    return tmp_path / "text"


def refusal(capsys, *words: str) -> str:
    """Return the one sentence of a command that refuses."""
    assert text_folder.main([*map(str, words)]) == 2
    first, sentence = capsys.readouterr().err.strip().split("\n")
    assert first == "1 mistake to correct:"
    return sentence


def test_the_text_folder_has_the_text_models_tensors_and_transformers_loads_it(image, text):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(text, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    content = json.loads((text / "config.json").read_text())
    assert type(model).__name__ == content["architectures"][0] and model.dtype == torch.bfloat16
    published_tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in all_tensors(image).items()
        if name.startswith(("model.language_model.", "lm_head."))
    }
    state = model.state_dict()
    assert state.keys() == published_tensors.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in published_tensors.items())
    ours = all_tensors(text)
    index = json.loads((text / INDEX).read_text())
    assert index["weight_map"].keys() == ours.keys() and index["metadata"]["by"] == "hand"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in ours.values())


def test_a_run_reads_the_text_folder_and_names_the_command_for_the_published_one(image, text):
    check_hf_weights(SafetensorsFolder(text), read_model_spec(text))
    with pytest.raises(UserError, match="python -m checkpoints_tools.text_folder"):
        read_model_spec(image)


@pytest.mark.parametrize("image", [True], indirect=True, ids=["mixture"])
def test_experts_of_a_stack_are_single_ones_in_the_text_folder(image, text):
    before, after = all_tensors(image), all_tensors(text)
    experts = "model.language_model.layers.1.mlp.experts"
    assert not any("experts.gate_up_proj" in name or "experts.down_proj" in name for name in after)
    for number in range(4):
        one = f"model.layers.1.mlp.experts.{number}"
        gate, up = before[f"{experts}.gate_up_proj"][number].chunk(2)
        assert torch.equal(after[f"{one}.gate_proj.weight"], gate) and torch.equal(after[f"{one}.up_proj.weight"], up)
        assert torch.equal(after[f"{one}.down_proj.weight"], before[f"{experts}.down_proj"][number])


def test_the_text_folder_carries_the_tokenizer_and_a_config_for_both_readers(image, text):
    assert (text / "tokenizer.json").read_bytes() == (image / "tokenizer.json").read_bytes()
    assert not (text / "preprocessor_config.json").exists()
    content = json.loads((text / "config.json").read_text())
    assert content["full_attention_interval"] == 4
    assert content["layer_types"] == 3 * ["linear_attention"] + ["full_attention"]
    assert not {"vision_config", "text_config", "mtp_num_hidden_layers"} & content.keys()


def test_what_goes_there_and_back_is_the_same_byte_for_byte(image, text, tmp_path):
    assert text_folder.main([str(image), str(text), "--back", str(tmp_path / "back")]) == 0
    assert all_bytes(tmp_path / "back") == all_bytes(image)


def test_trained_weights_go_back_from_the_files_of_save_pretrained(image, text, tmp_path):
    """It writes other files, and experts one by one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(text)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(tmp_path / "trained", max_shard_size="20KB")
    assert text_folder.main([str(image), str(tmp_path / "trained"), "--back", str(tmp_path / "back")]) == 0
    before, after = all_tensors(image), all_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_left_out = name.startswith(("model.visual.", "mtp."))
        assert torch.equal(after[name], tensor if is_left_out else 2 * tensor), name


def test_decays_go_back_in_the_type_of_the_published_file(dense, tmp_path):
    """A run writes A_log in float32; Qwen3.6 is published with it in bfloat16, Qwen3.5 in float32."""
    text, back = tmp_path / "text", tmp_path / "back"
    assert text_folder.main([str(dense), str(text)]) == 0
    for file in text.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: t.float() + 1e-5 if name.endswith("A_log") else t for name, t in tensors.items()}, file)
    (text / INDEX).unlink()
    assert text_folder.main([str(dense), str(text), "--back", str(back)]) == 0
    before, after, trained = all_tensors(dense), all_tensors(back), all_tensors(text)
    for name, tensor in after.items():
        if name.endswith("A_log"):
            assert torch.equal(tensor, trained[name.replace("language_model.", "")].bfloat16())
        else:
            assert torch.equal(tensor, before[name])


def test_a_single_file_without_index_stays_one(dense, tmp_path):
    image = tmp_path / "image"
    shutil.copytree(dense, image)
    tensors = all_tensors(image)
    for file in (*image.glob("*.safetensors"), image / INDEX):
        file.unlink()
    save_file(tensors, image / "model.safetensors")
    assert text_folder.main([str(image), str(tmp_path / "text")]) == 0
    assert [file.name for file in (tmp_path / "text").glob("*model*")] == ["model.safetensors"]
    assert text_folder.main([str(image), str(tmp_path / "text"), "--back", str(tmp_path / "back")]) == 0
    assert all_bytes(tmp_path / "back") == all_bytes(image)


@pytest.mark.parametrize("key", ["full_attention_interval", "layer_types"])
def test_of_a_text_folder_the_missing_words_on_layers_are_added(dense, tmp_path, key):
    whole, half, made = tmp_path / "whole", tmp_path / "half", tmp_path / "made"
    assert text_folder.main([str(dense), str(whole)]) == 0
    shutil.copytree(whole, half)
    content = json.loads((whole / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({name: value for name, value in content.items() if name != key}))
    assert text_folder.main([str(half), str(made)]) == 0
    assert all_bytes(made) == all_bytes(whole)


def test_an_older_folder_of_qwen3_next_gets_the_words_that_a_run_demands(tmp_path):
    """As published: `layer_types` and `rope_parameters` are not there."""
    from tests.unit.test_hybrid_config import QWEN3_NEXT_80B_A3B

    old = {key: value for key, value in QWEN3_NEXT_80B_A3B.items() if key not in ("layer_types", "rope_parameters")}
    old |= {"rope_scaling": None, "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    (tmp_path / "config.json").write_text(json.dumps(old))
    content = text_folder.text_config(tmp_path / "config.json")
    assert model_spec(content) == model_spec(QWEN3_NEXT_80B_A3B)


def cut(path: Path) -> None:
    file = path / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose(path: Path) -> None:
    (path / "model-1.safetensors").unlink()


def change_index(path: Path, name: str, file: str) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][name] = file
    (path / INDEX).write_text(json.dumps(index))


def change_text_config(path: Path, **changes) -> None:
    content = json.loads((path / "config.json").read_text())
    content["text_config"] |= changes
    (path / "config.json").write_text(json.dumps(content))


def add(path: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to the first file. Underscores of keys: dots."""
    file = path / "model-0.safetensors"
    save_file(load_file(file) | {name.replace("_", "."): tensor for name, tensor in tensors.items()}, file)


MISTAKES = {
    "a cut file": (cut, "model-1.safetensors` is not a safetensors file, or damaged"),
    "a lost file": (lose, "lacks model-1.safetensors of its index"),
    "an index that leads out": (lambda path: change_index(path, "lm_head.weight", "../f.safetensors"), "folder itself"),
    "an index of nothing": (lambda path: change_index(path, "more", "model-0.safetensors"), "names more in files that"),
    "an index that is none": (lambda path: (path / INDEX).write_text("[]"), "is not an index of tensors"),
    "a tensor of no use": (lambda path: add(path, model_audio_weight=torch.ones(1)), "model.audio.weight"),
    "a name twice": (lambda path: add(path, model_norm_weight=torch.ones(1)), "model.norm.weight"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "another model": (lambda path: (path / "config.json").write_text('{"architectures": ["Gemma"]}'), "Gemma"),
    "layers that differ": (lambda path: change_text_config(path, full_attention_interval=2), "layer_types"),
    "an interval of 0": (lambda path: change_text_config(path, full_attention_interval=0), "config.json"),
    "tied and not": (lambda path: change_text_config(path, tie_word_embeddings=True), "tie_word_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_with_a_mistake_is_refused_in_a_sentence_and_leaves_no_output(dense, tmp_path, capsys, mistake):
    image = shutil.copytree(dense, tmp_path / "image")
    change, word = MISTAKES[mistake]
    change(image)
    assert word in refusal(capsys, image, tmp_path / "text")
    assert [path.name for path in tmp_path.iterdir()] == ["image"]


def test_an_existing_folder_is_left_alone(dense, tmp_path, capsys):
    assert "exists already" in refusal(capsys, dense, tmp_path)
    assert not list(tmp_path.iterdir())


def change_norm(path: Path, tensor: torch.Tensor | None) -> None:
    """Write another tensor in place of the last norm, or None: leave it out."""
    (path / INDEX).unlink()
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop("model.norm.weight", None) is not None:
            save_file(tensors | ({} if tensor is None else {"model.norm.weight": tensor}), file)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda path: change_norm(path, None), "lacks model.norm.weight"),
        (lambda path: add(path, model_norm_bias=torch.ones(1)), "model.norm.bias, without a place"),
        (lambda path: change_norm(path, torch.ones(32)), "in the image folder"),
        (lambda path: change_norm(path, torch.ones(31).bfloat16()), "in the image folder"),
        (lambda path: change_norm(path, torch.ones(1, 32).bfloat16()), "in the image folder"),
    ],
    ids=["a lost tensor", "one too many", "another type", "another size", "another shape"],
)
def test_weights_that_do_not_fit_do_not_go_back(dense, tmp_path, capsys, change, word):
    assert text_folder.main([str(dense), str(tmp_path / "text")]) == 0
    change(tmp_path / "text")
    capsys.readouterr()
    assert word in refusal(capsys, dense, tmp_path / "text", "--back", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_full_disk_leaves_no_output(dense, tmp_path, capsys, monkeypatch):
    def full(piece, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text_folder, "_copy", full)
    assert "No space left" in refusal(capsys, dense, tmp_path / "text")
    assert not list(tmp_path.iterdir())
