"""The first parts for a new GPU machine (tests/gpu/first) start on the CPU,
and name the missing GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.huggingface.spec_reader import read_model_spec
from tests.helpers import REPOSITORY, be_rank_of_another_host

pytestmark = pytest.mark.unit

FIRST = REPOSITORY / "tests" / "gpu" / "first"
NEEDS_A_GPU = 77


def run(part: str, *arguments: object, code: int = 0, **environment: str) -> str:
    """The lines of a part that begin with >>."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, str(FIRST / part), *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith(">>"))


def test_smoke_imports_what_a_rank_imports():
    said = run("smoke.py", code=NEEDS_A_GPU)
    assert "ok imports of a trainer's rank" in said and "no GPU" in said


def test_a_push_arrives_byte_for_byte():
    """As in tests/distributed/test_weight_sync_group.py, by the part itself."""
    said = run("push.py", code=NEEDS_A_GPU)
    assert said.count("the same bytes") == 4 and "OTHER BYTES" not in said


def test_the_model_of_a_step_is_read_and_its_configs_hold(tmp_path):
    run("model.py", "tiny", tmp_path / "model")
    assert read_model_spec(tmp_path / "model").num_layers == 2
    for name in ("step.yaml", "demo.yaml"):
        synthetic = ["trainer.synthetic_batch=true", "trainer.save_interval=-1"]
        path = [f"actor_rollout_ref.model.path={tmp_path / 'model'}"] if name == "step.yaml" else []
        load_and_validate(FIRST / name, [*synthetic, *path])


METRICS = ("actor/loss", "actor/entropy", "actor/grad_norm")


def written(path: Path, *values: float) -> None:
    path.write_text("".join(json.dumps(dict.fromkeys(METRICS, value)) + "\n" for value in values))


@pytest.mark.parametrize(
    ("values", "code", "says"),
    [((1.0, 2.0), 0, "step 2"), ((1.2, 2.0), 1, "TOO FAR"), ((), 1, "0 of 2 steps"), ((1.0,), 1, "1 of 2 steps")],
)
def test_a_run_that_is_far_from_its_reference_or_short_of_it_is_told(tmp_path, values, code, says):
    for name in ("demo-cpu", "demo-gpu-float32"):
        written(tmp_path / f"{name}.metrics.jsonl", 1.0, 2.0)
    written(tmp_path / "demo-gpu-bfloat16.metrics.jsonl", *values)
    assert says in run("shown.py", "demo", tmp_path, code=code)


def test_each_rank_is_of_another_host_for_nccl():
    script = "import os; print('>>', os.environ['NCCL_HOSTID'])"
    environment = {**os.environ, "PYTHONPATH": str(FIRST / "ranks"), "RANK": "3"}
    environment.pop("NCCL_HOSTID", None)
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == ">> rank-3"


def test_a_process_that_another_starts_says_another_host_than_its_parent(monkeypatch):
    for name in ("LOCAL_RANK", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    hosts = []
    for rank in (0, 1):
        be_rank_of_another_host(rank)
        hosts.append(os.environ["NCCL_HOSTID"])
    assert hosts == ["rank-0", "rank-1"]


def test_gpu_tests_have_the_environment_of_a_rank():
    script = "import os, tests.gpu.conftest; print('>>', os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == ">> 1"
