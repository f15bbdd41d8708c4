"""Files of others are read within bounds: no pipe is waited for, no size or depth is trusted."""

import json
import os

import pytest

from megatron_dapo.common.bounded import parse_json, read_bytes, read_json

pytestmark = pytest.mark.unit


def test_a_file_is_read_up_to_its_bound_and_not_beyond(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1024)
    assert read_bytes(path, 1024) == b"x" * 1024
    with pytest.raises(OSError, match="larger than") as raised:
        read_bytes(path, 1023)
    assert raised.value.filename == str(path) and raised.value.strerror


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        path = "/dev/zero"
    with pytest.raises(OSError) as raised:
        read_json(path)
    assert raised.value.strerror


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth, is_read", [(100, True), (101, False), (5_000, False), (1_000_000, False)])
def test_a_depth_beyond_the_bound_is_an_error_of_the_value(opening, closing, depth, is_read):
    text = opening * depth + ("1" if opening != "[" else "") + closing * depth
    if is_read:
        assert parse_json(text) == json.loads(text)
        return
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json(text)


def test_a_flat_text_may_have_any_number_of_lists():
    assert parse_json(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001


@pytest.mark.parametrize("text", ["1" + "0" * 400, "9" * 5000, "1e400"])
def test_a_number_that_no_float_holds_is_infinite(text):
    assert parse_json(text) == float("inf") and parse_json(f"-{text}") == float("-inf")
    assert parse_json(str(2**128)) == 2**128


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"nul", b'{"a": 1} 2', b"\xef\xbb\xbf{}"])
def test_what_is_no_json_is_an_error_of_the_value(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        read_json(path)
