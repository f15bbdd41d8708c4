"""Files appear whole or not at all, and the error of a full disk names the file."""

import errno
import os

import pytest

from megatron_dapo.common.files import whole_file, write_whole

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch, number):
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as raised:
        write_whole(path, "new")
    assert raised.value.filename == str(path) and raised.value.errno == number and str(path) in str(raised.value)
    assert path.read_text() == "old" and [*path.parent.iterdir()] == [path]


def test_the_error_of_something_else_stays_as_it_is(tmp_path):
    with pytest.raises(OSError) as raised, whole_file(tmp_path / "file"):
        raise ConnectionResetError(errno.ECONNRESET, "gone")
    assert raised.value.filename is None and not (tmp_path / "file").exists()
