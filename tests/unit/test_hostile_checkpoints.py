"""A stranger's checkpoint: nothing named in it is run, on any way in;
one sentence names its file."""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_arrays
from torch.distributed.checkpoint import FileSystemReader
from torch.serialization import get_safe_globals

from checkpoints_tools import hf_to_megatron, inspect_checkpoint, megatron_to_hf, verify_checkpoint
from megatron_dapo.checkpointing.folders import read_trainer_state
from megatron_dapo.checkpointing.manifest import write_manifest
from megatron_dapo.checkpointing.model_weights import load_weights
from megatron_dapo.checkpointing.state_file import read_state
from megatron_dapo.checkpointing.torch_dist import reading
from megatron_dapo.checkpointing.torch_dist.loading import load
from megatron_dapo.checkpointing.torch_dist.saving import save
from megatron_dapo.commands.evaluation import command as evaluation
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.training.policy import Policy
from megatron_dapo.training.reference import Reference
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


class Harmful:
    """Leaves a file in the current folder when unpickled."""

    def __reduce__(self):
        return (open, ("harm", "w"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", "qwen2", vocab=67, layers=1)


@pytest.fixture(scope="module")
def converted(model_path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "step_000003"
    assert hf_to_megatron.main(["--hf-model", str(model_path), "--output", str(out)]) == 0
    return out


@pytest.fixture
def checkpoint(converted, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(converted, tmp_path / "step_000003")


def policy_of(layout, model_path: Path) -> Policy:
    return Policy(load_config(None, [f"actor_rollout_ref.model.path={model_path}"]), layout)


def evil_index(folder: Path) -> Path:
    """In a place that says nothing about tensors."""
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    index.planner_data = Harmful()
    path.write_bytes(pickle.dumps(index))
    return path


def evil_common(folder: Path) -> Path:
    torch.save({"common": {"format": 1, "x": Harmful()}}, folder / "common.pt")
    return folder / "common.pt"


def evil_tensor(folder: Path) -> Path:
    """Every piece of a file in place of its tensor."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    content = io.BytesIO()
    torch.save(Harmful(), content)
    (path,) = {folder / place.relative_path for place in index.storage_data.values()}
    path.write_bytes(content.getvalue())
    for place in index.storage_data.values():
        place.offset, place.length = 0, len(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder  # all files are read side by side: the folder is named


EVILS = {"index": evil_index, "common": evil_common, "tensor": evil_tensor}


def spoiled(checkpoint: Path, evil: Callable[[Path], Path]) -> Path:
    """The file, in a checkpoint with a right manifest."""
    path = evil(checkpoint / "megatron")
    write_manifest(checkpoint, ["model"], flush=False)
    return path


def refused(path: Path, said: str) -> None:
    assert str(path) in said and not Path("harm").exists(), said


@pytest.mark.parametrize("evil", EVILS)
def test_the_converter_runs_nothing(checkpoint, evil, capsys):
    path = spoiled(checkpoint, EVILS[evil])
    assert megatron_to_hf.main(["--checkpoint", str(checkpoint), "--output", "out"]) == 2
    count, *sentences = capsys.readouterr().err.split("1 mistake")[-1].splitlines()
    assert len(sentences) == 1
    refused(path, sentences[0])
    assert not Path("out").exists()


@pytest.mark.parametrize("evil", ["index", "common"])
def test_looking_at_a_checkpoint_runs_nothing(checkpoint, evil, capsys):
    path = spoiled(checkpoint, EVILS[evil])
    assert inspect_checkpoint.main([str(checkpoint)]) == 2
    refused(path, capsys.readouterr().err)


def test_comparing_two_checkpoints_runs_nothing(checkpoint, converted, capsys):
    spoiled(checkpoint, evil_tensor)
    assert inspect_checkpoint.main(["--diff", str(converted), str(checkpoint)]) == 2
    refused(checkpoint / "megatron", capsys.readouterr().err)


def test_the_check_of_a_conversion_runs_nothing(checkpoint, model_path, capsys):
    path = spoiled(checkpoint, evil_index)
    assert verify_checkpoint.main(["--hf-model", str(model_path), "--checkpoint", str(checkpoint)]) == 2
    refused(path, capsys.readouterr().err)


def test_an_evaluation_runs_nothing(checkpoint, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = spoiled(checkpoint, evil_index)
    with pytest.raises(UserError, match="could not be converted, as said above"):
        evaluation._converted(checkpoint, Path("evaluation"))
    refused(path, capfd.readouterr().err)


@pytest.mark.parametrize("evil", EVILS)
def test_a_run_that_starts_from_a_checkpoint_runs_nothing(checkpoint, evil, layout):
    """`model.path`."""
    path = spoiled(checkpoint, EVILS[evil])
    with pytest.raises(UserError) as caught:
        Policy(load_config(None, [f"actor_rollout_ref.model.path={checkpoint}"]), layout, load_weights)
    refused(path, str(caught.value))


@pytest.mark.parametrize("evil", EVILS)
def test_a_reference_from_a_checkpoint_runs_nothing(checkpoint, evil, layout, model_path):
    """`ref.path`."""
    path = spoiled(checkpoint, EVILS[evil])
    words = [f"actor_rollout_ref.model.path={model_path}", f"actor_rollout_ref.ref.path={checkpoint}"]
    with pytest.raises(UserError) as caught:
        Reference(load_config(None, words), layout, load_weights)
    refused(path, str(caught.value))


@pytest.fixture(scope="module")
def saved(layout, model_path, tmp_path_factory) -> Path:
    """Of training: with an optimizer and generators."""
    folder = tmp_path_factory.mktemp("saved") / "megatron"
    state = policy_of(layout, model_path)
    save(folder, state.model, layout, optimizer=state.state.optimizer, lr_schedule=state.state.lr_schedule)
    return folder


def resume(folder: Path, layout, model_path: Path):
    state = policy_of(layout, model_path)
    return load(folder, state.model, layout, optimizer=state.state.optimizer, lr_schedule=state.state.lr_schedule)


def replace_generators(folder: Path, content: bytes) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    (folder / "generators.distcp").write_bytes(content)
    (key,) = [key for key in index.storage_data if key.fqn.startswith("rng_state")]
    index.storage_data[key] = type(index.storage_data[key])("generators.distcp", 0, len(content))
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def stored(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def harmful_numpy() -> list[dict]:
    return [{"python": random.getstate(), "numpy": ("MT19937", np.array([Harmful()]), 0, 0, 0.0)}]


def packed_zeros() -> bytes:
    """A GB in a MB."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(None, protocol=2))
        archive.writestr("archive/data/0", bytes(2**27))
    return content.getvalue()


def test_the_generators_of_a_checkpoint_come_back_to_the_bit(saved, layout, model_path):
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    folder = saved.with_name("seeded")
    state = policy_of(layout, model_path)
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    save(folder, state.model, layout, optimizer=state.state.optimizer, lr_schedule=state.state.lr_schedule)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    assert "rng" in resume(folder, layout, model_path).restored
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


@pytest.mark.parametrize("evil", [*EVILS, "object", "numpy", "bomb", "values"])
def test_resuming_runs_nothing(saved, evil, layout, model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(saved, tmp_path / "megatron")
    contents = {
        "object": lambda: stored([Harmful()]),
        "numpy": lambda: stored(harmful_numpy()),
        "bomb": packed_zeros,
        "values": lambda: stored([{"python": 1, "numpy": "x"}]),
    }
    path = folder
    if evil in EVILS:
        path = EVILS[evil](folder)
    else:
        replace_generators(folder, contents[evil]())
    with pytest.raises(UserError) as caught:
        resume(folder, layout, model_path)
    refused(path, str(caught.value))


def test_the_index_is_read_as_torch_reads_it(saved):
    index, expected = reading.read_index(saved), FileSystemReader(saved).read_metadata()
    assert index.storage_data == expected.storage_data
    assert index.state_dict_metadata == expected.state_dict_metadata


def changed_index(folder: Path, change: Callable) -> None:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def first(index):
    return next(entry for entry in index.state_dict_metadata.values() if hasattr(entry, "chunks"))


def where(index):
    return next(iter(index.storage_data.values()))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: setattr(where(index), "relative_path", "../__0_0.distcp"),
        lambda index: setattr(where(index), "relative_path", os.devnull),
        lambda index: setattr(where(index), "transform_descriptors", ["stream.zstd/1"]),
        lambda index: setattr(where(index), "offset", -1),
        lambda index: setattr(where(index), "length", 2**70),
        lambda index: setattr(where(index), "length", True),
        lambda index: setattr(first(index), "size", (3, 4)),
        lambda index: setattr(first(index), "size", torch.Size([1] * 65)),
        lambda index: setattr(first(index), "size", torch.Size([1])),
        lambda index: setattr(first(index), "properties", "float32"),
        lambda index: setattr(first(index), "chunks", [index]),
        lambda index: index.state_dict_metadata.update({"x": "tensor"}),
        lambda index: index.storage_data.update({"x": where(index)}),
        lambda index: setattr(index, "storage_data", None),
        lambda index: setattr(index, "planner_data", OrderedDict(a=1)),
    ],
)
def test_an_index_that_says_anything_else_is_damaged(saved, tmp_path, change):
    folder = shutil.copytree(saved, tmp_path / "megatron")
    changed_index(folder, change)
    with pytest.raises(UserError, match=r"\.metadata is damaged .*; use another checkpoint\.$"):
        reading.read_index(folder)


@pytest.mark.parametrize(
    "content", [b"", b".", b"N.", pickle.dumps([]), pickle.dumps(os.getpid), b"\x80\x04" + b"(" * 9]
)
def test_what_is_no_index_is_damaged(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata is damaged"):
        reading.read_index(tmp_path)


def test_a_class_cannot_be_changed_by_what_is_read(tmp_path):
    """Pickle's BUILD sets attributes, of classes too."""
    known = ("torch.distributed.checkpoint.metadata", "Metadata")
    content = b"\x80\x02c" + "\n".join(known).encode() + b"\n(N}X\x01\x00\x00\x00aK\x01stb."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata is damaged"):
        reading.read_index(tmp_path)


def test_an_index_too_large_is_not_read(tmp_path, monkeypatch):
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(reading.MAX_INDEX_BYTES + 1)
    monkeypatch.setattr(reading._IndexUnpickler, "load", lambda self: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"\.metadata is damaged .*an index has at most"):
        reading.read_index(tmp_path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(saved, layout, model_path, tmp_path):
    for name in (".metadata", "common.pt", "__0_0.distcp"):
        folder = shutil.copytree(saved, tmp_path / name)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=str(folder)):
            resume(folder, layout, model_path)


def test_what_megatron_allows_in_all_of_torch_is_not_allowed_in_a_checkpoint(saved, layout, tmp_path):
    """It lets torch.load make arrays of numpy, and more."""
    before = set(get_safe_globals())
    assert before, "Megatron is imported"
    torch.save({"common": {"x": np.arange(3)}}, tmp_path / "common.pt")
    with pytest.raises(UserError, match=r"common\.pt is damaged"):
        reading.read_common(tmp_path)
    assert set(get_safe_globals()) == before
    assert json.dumps(reading.read_common(saved))


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff"])
def test_a_state_of_any_depth_is_one_sentence(tmp_path, content):
    (tmp_path / "trainer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"trainer\.json is damaged .*; use another checkpoint"):
        read_trainer_state(tmp_path)
    state = tmp_path / "controller.safetensors"
    state.write_bytes(save_arrays({"json": np.frombuffer(content, np.uint8)}))
    with pytest.raises(ValueError):
        read_state(state)
