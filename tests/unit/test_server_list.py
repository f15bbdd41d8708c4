"""The list of servers: a watched file, written by others while it is read."""

import errno
import os
from pathlib import Path

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.servers.server_list import ServerList

pytestmark = pytest.mark.unit


def test_a_file_has_a_url_per_line_and_may_be_commented(tmp_path):
    file = tmp_path / "servers.txt"
    servers = ServerList(file=file)
    assert servers.read() == []  # not there yet
    file.write_text("# node 1\nhttp://a:1\n\n  http://b:2/  # the new one\nhttp://a:1\n")
    assert servers.read() == servers.read_or_keep() == ["http://a:1", "http://b:2"]
    file.write_text("http://b:2")
    assert servers.read_or_keep() == ["http://b:2"]
    file.write_text("# all gone\n")
    assert servers.read_or_keep() == []


def test_a_malformed_line_is_named_and_a_run_that_goes_on_keeps_its_servers(tmp_path, caplog):
    file = tmp_path / "servers.txt"
    file.write_text("http://a:1\n")
    servers = ServerList(file=file)
    assert servers.read() == ["http://a:1"]
    file.write_text("http://a:1\nhttp://b\n")  # as a reader sees it that comes too early
    with pytest.raises(UserError, match=r"server_urls_file .*servers.txt, line 2: 'http://b' is not of the form"):
        servers.read()
    assert servers.read_or_keep() == servers.read_or_keep() == ["http://a:1"]
    file.unlink()
    assert servers.read_or_keep() == servers.read_or_keep() == ["http://a:1"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "once each"
    assert "line 2" in caplog.messages[0] and "is not there" in caplog.messages[1]
    file.write_text("http://a:1\nhttp://b:2\n")
    assert servers.read_or_keep() == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(("number", "words"), [(errno.ENOENT, "is not there"), (errno.ESTALE, "cannot be read")])
def test_a_file_that_goes_while_it_is_looked_at_drops_no_server(tmp_path, monkeypatch, caplog, number, words):
    """Between two looks, as on a network file system."""
    file = tmp_path / "servers.txt"
    file.write_text("http://a:1\n")
    servers = ServerList(file=file)
    assert servers.read_or_keep() == ["http://a:1"]

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        assert servers.read_or_keep() == servers.read_or_keep() == ["http://a:1"]
        patch.setattr(Path, "stat", fail)
        assert servers.read_or_keep() == ["http://a:1"]
    assert len(caplog.messages) == 1 and words in caplog.messages[0]
    file.write_text("http://b:2\n")
    assert servers.read_or_keep() == ["http://b:2"]
