"""`launch.preflight` on several nodes: each trouble is found, and its node named with the cure."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def preflights(tmp_path_factory) -> tuple[Path, dict[str, list[int]]]:
    """The folder of all nodes' output, and their exit codes."""
    folder = tmp_path_factory.mktemp("preflights")
    command = [sys.executable, "-m", "tests.distributed.preflight_worker", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def said(preflights, job: str, index: int) -> str:
    return (preflights[0] / f"{job}-{index}.log").read_text()


def test_fit_nodes_get_a_table_and_nothing_is_left_behind(preflights):
    assert preflights[1]["well"] == [0, 0, 0, 0]
    lines = said(preflights, "well", 0).splitlines()
    assert lines[0] == "Preflight of 4 nodes" and lines[-1] == "preflight: ok"
    names = [re.split(r"  +", line.strip())[1] for line in lines[1:-1]]
    assert all(line.startswith("  ok  ") for line in lines[1:-1])
    assert names == [
        *("versions", "shared folder", "files", "GPUs", "compiler", "disk", "scratch", "limits", "ports"),
        *("all-reduce", "HTTP", "server all-reduce"),
    ]
    assert "all 4" in lines[1]
    of_trainer, of_server = (line for line in lines if "all-reduce" in line)
    assert "node0, node1" in of_trainer and "2 ranks" in of_trainer
    assert "node2, node3" in of_server and "4 ranks" in of_server  # two of each node of the server
    assert [said(preflights, "well", index) for index in (1, 2, 3)] == ["preflight: ok\n"] * 3
    assert not (preflights[0] / "well-shared").exists()


@pytest.mark.parametrize(
    ("job", "node", "what", "cure"),
    [
        ("version", "node2", "has sglang 0.5.19, the others", "use one environment"),
        ("folder", "node1", "does not see /tmp/preflight-elsewhere/", "must be on storage mounted"),
        ("missing", "node1", "not heard of within 20 s", "look at its log, and whether it reaches node0 at 127.0.0.1:"),
        ("http", "node2", "HTTP fails (node0 -> node2: [Errno 111] Connection refused", "look at its firewall"),
        ("given", "node0", "does not reach http://127.0.0.1:1 ([Errno 111] Connection refused)", "start them"),
        ("roles", "node0", "there are 3 trainer and 0 server nodes", "start as many"),
        ("interface", "node2", "the all-reduce of 4 ranks failed (ifa != nullptr", "set GLOO_SOCKET_IFNAME"),
        ("server link", "node3", "the all-reduce of 2 ranks failed (ifa != nullptr", "set GLOO_SOCKET_IFNAME"),
        ("slow", "node1", "reaches 0.0", "it is so with every node that was tried"),
    ],
)
def test_the_node_that_has_a_trouble_is_named_by_all_with_the_cure(preflights, job, node, what, cure):
    assert set(preflights[1][job]) == {1}
    logs = [path.read_text() for path in sorted(preflights[0].glob(f"{job}-?.log"))]
    verdicts = {log.splitlines()[-1] for log in logs}
    assert len(verdicts) == 1, verdicts
    verdict = verdicts.pop()
    assert verdict.startswith(f"preflight: {node}: {what}") or verdict.startswith(f"preflight: {node}: the all-reduce")
    assert what in verdict and cure in verdict
    assert all(log.count("preflight: ") == 1 for log in logs), logs  # nobody else is blamed


def test_dumped_batches_need_no_server_nodes_for_any_recipe(preflights):
    assert preflights[1]["replay"] == [0]
    assert "HTTP" not in said(preflights, "replay", 0)


def test_where_all_nodes_are_slow_alike_all_are_named(preflights):
    assert preflights[1]["all slow"] == [1, 1, 1]
    verdicts = [line for line in said(preflights, "all slow", 2).splitlines() if line.startswith("preflight: ")]
    assert [verdict.split(": ")[1] for verdict in verdicts] == ["node1", "node0"]
    assert all("no node is better than the others" in verdict for verdict in verdicts)


def test_one_machine_needs_no_options(tmp_path):
    command = [sys.executable, "-m", "launch.preflight", "--config", "configs/demo.yaml"]
    command += [f"trainer.run_dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("Preflight of 1 node\n") and done.stdout.endswith("\npreflight: ok\n")
    assert not (tmp_path / "run").exists()
