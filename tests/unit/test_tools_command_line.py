"""Common traits of the commands of checkpoints_tools: --help, a progress bar if somebody looks."""

import io
from contextlib import redirect_stderr
from importlib import import_module

import pytest

from checkpoints_tools.command_line import progress
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

TOOLS = (
    "hf_to_megatron",
    "megatron_to_hf",
    "inspect_checkpoint",
    "verify_checkpoint",
    "dedup_dataset",
    "score_dataset",
    "text_folder",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.mark.parametrize("tool", TOOLS)
def test_help_explains_every_option(tool, capsys):
    with pytest.raises(SystemExit) as end:
        import_module(f"checkpoints_tools.{tool}").main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and f"python -m checkpoints_tools.{tool}" in printed
    source = (REPOSITORY / "checkpoints_tools" / f"{tool}.py").read_text()
    options = [part.partition('"')[0] for part in source.split('add_argument("')[1:]]
    assert options and all(option in printed for option in options)


def test_a_bar_is_shown_on_a_terminal(terminal):
    with redirect_stderr(terminal), progress("reading", 2000, "bytes") as advance:
        advance(500)
        advance(1500)
    assert "reading" in terminal.getvalue() and "2,000 of 2,000" in terminal.getvalue()


@pytest.mark.parametrize("why", ["another process", "no terminal"])
def test_no_bar_is_shown_without_a_terminal(terminal, monkeypatch, why):
    if why == "another process":
        monkeypatch.setenv("SLURM_PROCID", "1")
    else:
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    with redirect_stderr(terminal), progress("reading", 1, "bytes") as advance:
        advance(1)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("tool", "option", "smallest"),
    [("hf_to_megatron", "--tp", 1), ("megatron_to_hf", "--pp", 1), ("verify_checkpoint", "--num-tokens", 0)],
)
def test_an_invalid_or_too_small_number_is_refused(tool, option, smallest, capsys):
    for wrong in ("two", str(smallest - 1)):
        with pytest.raises(SystemExit) as end:
            import_module(f"checkpoints_tools.{tool}").main([option, wrong])
        assert end.value.code == 2
        assert f"argument {option}: {wrong} is not a whole number of at least {smallest}" in capsys.readouterr().err
