"""How a demo starts and ends."""

import json
import os
import subprocess
import sys

import pytest

from examples import demo_run
from examples.arithmetic import demo
from megatron_dapo.common.files import write_whole
from megatron_dapo.storage.run_folder import RunFolder

pytestmark = pytest.mark.unit


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Runs the demo with a run that only writes metrics:
    a function overrides -> (exit code, configs run)."""
    configs = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def start(*overrides: str, exit_code: int = 0, meanwhile=lambda: None):
        def run_local(config):
            meanwhile()
            configs.append(config)
            records = [{"step": 0, "val/accuracy": 0.27}, {"step": 1, "reward/mean": 0.4, "time/step": 2.0}]
            write_whole(RunFolder.of(config.trainer).metrics, "".join(json.dumps(r) + "\n" for r in records))
            return exit_code

        monkeypatch.setattr(demo_run, "run_local", run_local)
        return demo.DEMO.run([f"trainer.run_dir={tmp_path / 'run'}", *overrides]), configs

    return start


def test_a_good_run_ends_with_the_table_and_what_to_try_next(started, capsys, tmp_path):
    code, (config,) = started("trainer.total_training_steps=1")
    shown = capsys.readouterr().out
    assert code == 0 and config.trainer.total_training_steps == 1
    assert "held-out accuracy" in shown and "0.270" in shown and "what to try next" in shown
    assert str(tmp_path / "run" / "rollouts" / "step_000001.jsonl") in shown


def test_a_good_run_ends_with_a_report_and_what_to_look_at(started, capsys, tmp_path):
    assert started("trainer.total_training_steps=1")[0] == 0
    shown = capsys.readouterr().out
    assert f"report: {tmp_path / 'run' / 'report.html'}\nopen it in a browser, and look at\n  Curves " in shown
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")


def test_a_report_that_cannot_be_written_does_not_fail_the_demo(started, capsys, tmp_path):
    def in_the_way():
        (tmp_path / "run" / "report.html").mkdir(parents=True)

    assert started("trainer.total_training_steps=1", meanwhile=in_the_way)[0] == 0
    assert "no report: " in capsys.readouterr().out


def test_a_failed_run_ends_with_its_exit_code_and_where_the_logs_are(started, capsys, tmp_path):
    code, _ = started(exit_code=7)
    assert code == 7
    assert str(tmp_path / "run" / "logs") in capsys.readouterr().err


def test_a_mistake_is_reported_before_anything_is_started_or_moved(started, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    code, configs = started("trainer.total_training_step=3")
    assert (code, configs) == (2, [])
    assert "total_training_steps" in capsys.readouterr().err
    assert not (tmp_path / "run-1").exists()


def test_a_good_run_has_its_exit_code_though_nobody_reads_how_it_ended(started, monkeypatch):
    """As in `make demo | head`."""
    ours, its = os.pipe()
    with open(its, "w") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        assert started(meanwhile=lambda: os.close(ours))[0] == 0


def test_a_cache_that_cannot_be_written_is_a_mistake_of_the_user(started, monkeypatch, capsys):
    """As in a repository that another user has installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert started() == (2, [])
    assert "choose another XDG_CACHE_HOME" in capsys.readouterr().err


def test_earlier_runs_are_kept(started, tmp_path):
    for _ in range(3):
        assert started()[0] == 0
    assert all(RunFolder(tmp_path / name).metrics.exists() for name in ("run", "run-1", "run-2"))


def test_the_demo_is_imported_without_torch():
    code = "import sys; import examples.arithmetic.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=demo_run.ROOT, timeout=60).returncode == 0
