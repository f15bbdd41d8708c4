"""A folder appears whole or not at all; of two processes writing the same one the second is
refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.storage.staged_folder import StagedFolder

pytestmark = pytest.mark.unit

WRITER = """
import sys
from megatron_dapo.storage.staged_folder import StagedFolder
folder = StagedFolder(sys.argv[1])
folder.open()
(folder.staging / "weights").write_text("theirs")
print("open", flush=True)
if sys.stdin.read() == "publish":
    folder.publish()
folder.discard()
"""


def writer(path: Path) -> subprocess.Popen:
    """Another process, which has the folder open and waits."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], **pipes)
    assert process.stdout.readline() == "open\n"
    return process


def test_the_second_writer_is_refused_and_takes_nothing_from_the_first(tmp_path):
    path = tmp_path / "out"
    with writer(path) as other:
        folder = StagedFolder(path)
        with pytest.raises(UserError, match=f"out` is being written by process {other.pid} on .*; wait for its end"):
            folder.open()
        folder.discard()  # as a converter does in every case
        assert (tmp_path / ".out.staging" / "weights").read_text() == "theirs"
        other.communicate("publish")
    assert os.listdir(tmp_path) == ["out"] and (path / "weights").read_text() == "theirs"


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    path = tmp_path / "out"
    with writer(path) as other:
        other.kill()
        other.wait()
    assert sorted(os.listdir(tmp_path)) == [".out.lock", ".out.staging"]
    folder = StagedFolder(path)
    folder.open()
    assert not list(folder.staging.iterdir())
    folder.publish()
    folder.discard()
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_appeared_meanwhile_is_not_replaced(tmp_path):
    """As without locks, with the other writer unseen."""
    folder = StagedFolder(tmp_path / "out")
    folder.open()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights").write_text("theirs")
    with pytest.raises(UserError, match="out` exists already"):
        folder.publish()
    folder.discard()
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "weights").read_text() == "theirs"


def test_folders_above_it_go_with_it(tmp_path):
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "a" / "b" / "out"
    failed = StagedFolder(path)
    failed.open()
    failed.discard()
    assert not list((tmp_path / "there").iterdir())
    done = StagedFolder(path)
    done.open()
    done.publish()
    done.discard()
    assert os.listdir(path.parent) == ["out"]


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    folder, flushed = StagedFolder(tmp_path / "out"), set()
    folder.open()
    (folder.staging / "inner").mkdir()
    (folder.staging / "inner" / "file").write_text("1")
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.fsync",
            lambda descriptor: flushed.add(os.fstat(descriptor).st_ino) if folder.staging.exists() else None,
        )
        folder.publish()
    folder.discard()
    out = tmp_path / "out"
    assert {path.stat().st_ino for path in (out, out / "inner", out / "inner" / "file")} <= flushed
