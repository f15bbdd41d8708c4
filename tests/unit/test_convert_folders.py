"""A folder without a checkpoint of the kind asked for: the sentence names the right one."""

import json
import shutil
from pathlib import Path

import pytest

from checkpoints_tools.converted import open_checkpoint, read_conversion, read_spec, stored_dtype
from megatron_dapo.common.errors import UserError
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "model", "qwen2", vocab=67, layers=1)


@pytest.fixture
def checkpoint(model, tmp_path) -> Path:
    """Of training, but for the tensors."""
    from megatron_dapo.checkpointing.manifest import write_manifest

    folder = tmp_path / "runs" / "a" / "checkpoints" / "step_000012"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / ".metadata").write_bytes(b"no pickle")
    (folder / "hf").mkdir()
    shutil.copy(model / "config.json", folder / "hf")
    write_manifest(folder, ["model"])
    return folder


def test_without_a_model_the_sentence_names_the_right_folder(model, checkpoint, tmp_path):
    snapshot = tmp_path / "models--Org--Name" / "snapshots" / "0a1b"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(model, snapshot)
    (tmp_path / "empty").mkdir()
    for folder, said in (
        ("Qwen/Qwen2.5-7B", "`Qwen/Qwen2.5-7B` is not a folder here; .*: hf download Qwen/Qwen2.5-7B --local-dir"),
        (model / "config.json", "is not a folder here"),
        (checkpoint, "is a Megatron checkpoint; give the folder of a Hugging Face checkpoint"),
        (tmp_path / "models--Org--Name", f"is a cache of downloads; give a checkpoint in it, such as {snapshot}"),
        (tmp_path / "empty", "has no config.json"),
    ):
        with pytest.raises(UserError, match=f"^--hf-model: .*{said}"):
            read_spec(folder, "--hf-model")
    assert read_spec(snapshot, "--hf-model") == read_spec(model, "--hf-model")


def test_without_a_checkpoint_the_sentence_names_the_right_folder(model, checkpoint):
    for folder, said in (
        (checkpoint.parent, f"holds checkpoints; give one of them, such as {checkpoint}"),
        (checkpoint.parent.parent, f"holds checkpoints; give one of them, such as {checkpoint}"),
        (model, "is a Hugging Face checkpoint; give that of training or of a conversion"),
        (model / "config.json", "is not a folder"),
    ):
        with pytest.raises(UserError, match=f"^--checkpoint: .*{said}"):
            open_checkpoint(folder)
    assert open_checkpoint(checkpoint) == checkpoint
    assert open_checkpoint(checkpoint / "megatron") == checkpoint


def test_damage_that_sizes_do_not_show_is_a_sentence_too(checkpoint):
    """Reads before the comparison of checksums, which takes minutes."""
    with pytest.raises(UserError, match=r"^.*\.metadata is damaged .*; use another checkpoint"):
        stored_dtype(checkpoint)
    assert read_conversion(checkpoint) is None
    (checkpoint / "conversion.json").write_text(json.dumps({"plan": {}})[:-1])
    with pytest.raises(UserError, match=r"conversion\.json` is damaged"):
        read_conversion(checkpoint)


def test_every_file_of_a_tokenizer_comes_along_and_no_weights(model, tmp_path):
    from megatron_dapo.models.hf_io import copy_model_files

    source, out = shutil.copytree(model, tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    names = ("chat_template.jinja", "additional_chat_templates/tools.jinja", "vocab.json", "merges.txt")
    for name in names:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    copy_model_files(source, out)
    copied = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    there = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert copied == {*names, *there}
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in copied)
