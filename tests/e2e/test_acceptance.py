"""The whole ladder of acceptance, at the sizes of a CPU: TP2 PP2 DP2, two servers, a kill.

Programs other than checks of the machine are forks without imports, and so are their servers and
trainers: half the time.
"""

import json
from typing import Any

import pytest

from launch.acceptance.__main__ import main
from launch.acceptance.ladder import LADDER, NUM_STEPS, NUM_TURNS
from megatron_dapo.servers import child_process
from megatron_dapo.telemetry.closing_table import read_metrics
from tests.forked_commands import ForkedPopen
from tests.forked_servers import START
from tests.proofs import proof

pytestmark = pytest.mark.e2e

FORKED = ("launch.acceptance.environment", "benchmarks.", "checkpoints_tools.", "examples.")


def popen(command: list[str], **options: Any) -> Any:
    """The program as a fork, or as a process."""
    module = command[2]
    if module == "launch.local":
        return ForkedPopen([*command[:2], "tests.forked_local", *command[3:]], **options)
    return (ForkedPopen if module.startswith(FORKED) else START)(command, **options)


@proof
def test_a_healthy_machine_is_accepted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(child_process.subprocess, "Popen", popen)
    code = main(["--output", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert code == 0 and "ACCEPTED in" in shown.splitlines()[-2], shown
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    states = {each["name"]: each["state"] for each in report["rungs"]}
    assert states == {rung.name: "skipped" if rung.name == "gpu_tests" else "green" for rung in LADDER}
    assert report["is_accepted"] and report["sizes"]["whole"] == {"tp": 2, "pp": 2, "dp": 2}
    for each in report["rungs"]:
        if each["commands"]:
            assert each["log"] and each["seconds"] <= each["limit_s"]
    runs = tmp_path / "new" / "runs"
    for name in ("layout", "one_process", "servers", "whole", "killed"):
        assert [line["step"] for line in read_metrics(runs / name / "metrics.jsonl")] == list(range(1, NUM_STEPS + 1))
    steps = read_metrics(runs / "shared_gpus" / "metrics.jsonl")
    num_servers = [line["weight_sync/num_servers"] for line in steps if "actor/loss" in line]
    assert num_servers == [2] * (NUM_TURNS - 2) + [0, 2], "all servers die asleep in the last step but one"
    assert "resumed after " in next(each["text"] for each in report["rungs"] if each["name"] == "resume")
