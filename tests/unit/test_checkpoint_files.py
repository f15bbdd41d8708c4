"""The files of a checkpoint: every damage is found and named, folders appear whole, old ones go."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from megatron_dapo.checkpointing import folders
from megatron_dapo.checkpointing.folders import (
    CONTROLLER_STATE,
    add_controller_state,
    discard,
    newest_first,
    publish,
    read_controller_state,
    remove_leftovers,
    retire,
    staging,
    write_controller_state,
)
from megatron_dapo.checkpointing.manifest import MANIFEST, Findings, read_manifest, verify, write_manifest
from megatron_dapo.common.errors import UserError

pytestmark = pytest.mark.unit

CONTENT = {
    "megatron/.metadata": b"index" * 40,
    "megatron/__0_0.distcp": bytes(range(256)) * 8,
    "megatron/common.pt": b"c" * 77,
    "hf/config.json": b"{}",
    "trainer.json": b'{"step": 3}',
    "empty": b"",
}


def write_folder(folder):
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return write_manifest(folder, ["model"], flush=False)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine") / "step_000003"
    write_folder(folder)
    return folder


@pytest.fixture
def checkpoint(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "step_000003")


def test_a_whole_checkpoint_is_found_whole_with_its_contents(checkpoint):
    assert verify(checkpoint).is_whole and not verify(checkpoint).extra
    manifest = read_manifest(checkpoint)
    assert {name: record.size for name, record in manifest.files.items()} == {n: len(c) for n, c in CONTENT.items()}
    assert manifest.contents == ("model",) and set(manifest.versions) == {"torch", "megatron-core", "megatron_dapo"}
    assert manifest.num_bytes == sum(map(len, CONTENT.values()))


@settings(max_examples=60)
@given(data=st.data())
def test_any_single_damage_is_named_with_its_file(pristine, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(pristine, folder, dirs_exist_ok=True)
    kind = data.draw(st.sampled_from(["missing", "truncated", "grown", "flipped"]))
    names = [*CONTENT, MANIFEST]
    if kind in ("truncated", "flipped"):
        names.remove("empty")
    name = data.draw(st.sampled_from(names))
    content = (folder / name).read_bytes()
    if kind == "missing":
        (folder / name).unlink()
    elif kind == "truncated":
        (folder / name).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif kind == "grown":
        (folder / name).write_bytes(content + data.draw(st.binary(min_size=1, max_size=9)))
    else:
        position, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        (folder / name).write_bytes(flipped)
    damage = verify(folder).damage
    # a line end or blank more or less
    harmless = name == MANIFEST and _same_json(folder / name, content)
    assert harmless or (len(damage) == 1 and damage[0].startswith(name)), (kind, name, damage)


def _same_json(path, content):
    try:
        return json.loads(path.read_bytes()) == json.loads(content)
    except (FileNotFoundError, ValueError):
        return False


@given(missing=st.sets(st.sampled_from(sorted(CONTENT)), min_size=1))
def test_every_missing_file_is_named(pristine, tmp_path_factory, missing):
    folder = tmp_path_factory.mktemp("missing")
    shutil.copytree(pristine, folder, dirs_exist_ok=True)
    for name in missing:
        (folder / name).unlink()
    assert set(verify(folder).damage) == {f"{name} is missing" for name in missing}


def test_a_file_that_nobody_listed_is_named_and_does_no_harm(checkpoint):
    (checkpoint / "hf" / "notes.txt").write_text("mine")
    verdict = verify(checkpoint)
    assert verdict.is_whole and verdict.extra == ("hf/notes.txt",)


def test_without_contents_only_sizes_are_compared(checkpoint):
    (checkpoint / "trainer.json").write_bytes(b'{"step": 4}')
    assert verify(checkpoint, contents=False).is_whole and not verify(checkpoint).is_whole
    for change in (b"", b'{"step": 33}'):
        (checkpoint / "trainer.json").write_bytes(change)
        (damage,) = verify(checkpoint, contents=False).damage
        assert damage == f"trainer.json has {len(change)} bytes instead of 11"


def test_a_folder_of_a_newer_format_is_refused_with_both_versions(checkpoint, monkeypatch):
    monkeypatch.setattr("megatron_dapo.checkpointing.manifest.FORMAT_VERSION", 0)
    with pytest.raises(UserError, match="format version 2, this program reads 0"):
        read_manifest(checkpoint)


def test_a_folder_without_manifest_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} is not a complete checkpoint: manifest.json is missing"):
        read_manifest(tmp_path)
    with pytest.raises(UserError, match="the folder is missing"):
        read_manifest(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------ folders


def made(root, *steps):
    for step in steps:
        final = root / f"step_{step:06d}"
        staged = staging(final)
        (staged / "file").write_text(str(step))
        write_manifest(staged, [], flush=False)
        publish(staged, final)


def test_a_folder_has_its_name_only_when_it_is_published(tmp_path):
    final = tmp_path / "step_000004"
    staged = staging(final)
    (staged / "file").write_text("new")
    assert newest_first(tmp_path) == [] and not final.exists()
    with pytest.raises(AssertionError, match="no manifest"):
        publish(staged, final)
    write_manifest(staged, [])
    publish(staged, final)
    assert newest_first(tmp_path) == [final] and not staged.exists() and verify(final).is_whole


def test_one_of_the_same_step_is_replaced(tmp_path):
    made(tmp_path, 4)
    (tmp_path / "step_000004" / "damage").write_text("")
    made(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]
    assert verify(tmp_path / "step_000004").extra == ()


def test_checkpoints_are_listed_newest_first_and_nothing_else_is(tmp_path):
    made(tmp_path, 9, 10, 1_000_000, 2)
    for name in ("step_12", "step_000012.old", ".staging_step_000099", "latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000013").write_text("a file")
    assert [path.name for path in newest_first(tmp_path)] == [
        "step_1000000",
        "step_000010",
        "step_000009",
        "step_000002",
    ]
    assert newest_first(tmp_path / "nowhere") == []


@given(
    steps=st.sets(st.integers(1, 40), min_size=1, max_size=8),
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 10),
)
@settings(max_examples=25)
def test_the_newest_and_every_so_many_are_kept(tmp_path_factory, steps, keep_last, keep_every):
    root = tmp_path_factory.mktemp("root")
    for step in steps:
        (root / f"step_{step:06d}").mkdir()
    retire(newest_first(root)[0], keep_last, keep_every)
    newest = sorted(steps)[-keep_last:] if keep_last else sorted(steps)
    kept = set(newest) | {step for step in steps if keep_every and step % keep_every == 0}
    assert {int(path.name[5:]) for path in root.iterdir()} == kept


def test_damaged_ones_that_a_resume_skipped_count_for_nothing(tmp_path):
    """Resumed after 2, since 7 and 9 are damaged; beside 2 only the checkpoint
    of step 3 is whole."""
    made(tmp_path, 1, 2, 3, 7, 9)
    assert retire(tmp_path / "step_000003", keep_last=2, keep_every=None) == [tmp_path / "step_000001"]
    assert [path.name[-1] for path in newest_first(tmp_path)] == ["9", "7", "3", "2"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_left_and_logged(tmp_path, monkeypatch, caplog):
    """On a network file system a folder with an open file cannot be removed."""
    made(tmp_path, 1, 2)

    def refuse(folder):
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr("megatron_dapo.common.files.shutil.rmtree", refuse)
    assert retire(tmp_path / "step_000002", keep_last=1, keep_every=None) == []
    assert "step_000001, which is not needed, cannot be deleted (Directory not empty)" in caplog.text
    assert newest_first(tmp_path) == [tmp_path / "step_000002"]
    assert remove_leftovers(tmp_path) == []
    monkeypatch.undo()
    assert remove_leftovers(tmp_path) == [".retired_step_000001"]


def test_a_checkpoint_that_lies_elsewhere_behind_a_link_stays_there(tmp_path):
    made(tmp_path / "elsewhere", 1)
    made(tmp_path / "run", 2)
    (tmp_path / "run" / "step_000001").symlink_to(tmp_path / "elsewhere" / "step_000001")
    assert [path.name for path in retire(tmp_path / "run" / "step_000002", 1, None)] == ["step_000001"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_000002"]
    assert verify(tmp_path / "elsewhere" / "step_000001").is_whole


def test_what_a_killed_process_left_is_removed_and_checkpoints_stay(tmp_path):
    made(tmp_path, 3)
    staging(tmp_path / "step_000004")
    (tmp_path / ".retired_step_000002" / "megatron").mkdir(parents=True)
    assert remove_leftovers(tmp_path) == [".retired_step_000002", ".staging_step_000004"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]
    discard(tmp_path / "step_000003")
    discard(tmp_path / "step_000003")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_takes_a_later_state_of_the_rollout_and_is_whole_at_every_moment(tmp_path, monkeypatch):
    """Killed before the manifest names the new state, it has the old one."""
    (tmp_path / "tensors").write_bytes(b"x" * 32)
    write_controller_state(tmp_path, {"drawn": 1})
    write_manifest(tmp_path, ["model", "controller"])
    for number in (2, 3, 4):
        with monkeypatch.context() as patched:
            patched.setattr(folders, "write_manifest", killed)
            with pytest.raises(KeyboardInterrupt):
                add_controller_state(tmp_path, {"drawn": number})
        assert verify(tmp_path).is_whole and read_controller_state(tmp_path) == {"drawn": number - 1}
        add_controller_state(tmp_path, {"drawn": number})
        assert verify(tmp_path) == Findings(()) and read_controller_state(tmp_path) == {"drawn": number}
        assert read_manifest(tmp_path).contents == ("model", "controller")
    assert len(list(tmp_path.iterdir())) == 4  # of the states the first and the last


def killed(*_):
    raise KeyboardInterrupt


def test_the_controllers_state_comes_back_as_it_was_and_the_same_state_gives_the_same_bytes(tmp_path):
    state = {
        "cursor": {"epoch": 2},
        "queue": {"kept": [{"numbers": [-0.1, 1e-300, -2.5000000000000004]}], "text": "é\n"},
    }
    write_controller_state(tmp_path, state)
    first = (tmp_path / CONTROLLER_STATE).read_bytes()
    assert read_controller_state(tmp_path) == state
    write_controller_state(tmp_path, state)
    assert (tmp_path / CONTROLLER_STATE).read_bytes() == first
    with pytest.raises(TypeError):
        write_controller_state(tmp_path, {"extra_info": b"bytes"})


def test_arrays_of_a_state_come_back_as_they_were(tmp_path):
    """Also empty ones, and one in two places."""
    versions = np.array([3, 4], np.int32)
    state = {
        "kept": [{"tokens": np.arange(5, dtype=np.int32), "mask": np.array([1, 0], np.uint8), "text": "a"}],
        "open": [{"log_probs": np.zeros(0, np.float32), "versions": versions}, {"versions": versions}],
    }
    write_controller_state(tmp_path, state)
    read = read_controller_state(tmp_path)
    (kept,), (first, second) = read["kept"], read["open"]
    assert kept["tokens"].tolist() == [0, 1, 2, 3, 4] and kept["mask"].tolist() == [1, 0] and kept["text"] == "a"
    assert len(first["log_probs"]) == 0 and first["versions"].tolist() == second["versions"].tolist() == [3, 4]
    dtypes = [array.dtype.name for array in (kept["tokens"], kept["mask"], first["log_probs"], first["versions"])]
    assert dtypes == ["int32", "uint8", "float32", "int32"]


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2), np.int32), np.array([None])])
def test_an_array_of_another_kind_is_refused(tmp_path, array):
    with pytest.raises(TypeError, match="cannot hold"):
        write_controller_state(tmp_path, {"extra_info": array})


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\0" * 64, save({"other": np.zeros(1, np.uint8)})])
def test_a_damaged_state_is_a_value_error(tmp_path, content):
    (tmp_path / CONTROLLER_STATE).write_bytes(content)
    with pytest.raises(ValueError):
        read_controller_state(tmp_path)
