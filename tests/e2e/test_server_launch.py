"""launch.local and launch.sglang_server with real servers: failures are named,
and nothing is left."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.local import run_local
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE
from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.server_key import read_server_key, server_key_file
from tests.helpers import REPOSITORY, free_port
from tests.proofs import proof
from tests.tiny_models import make_tiny, make_tiny_classifier

pytestmark = pytest.mark.e2e

SERVER = "actor_rollout_ref.rollout.server"


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"data_source": "exact_match", "prompt": f"{i}+1=", "reward_model": {"ground_truth": "2"}} for i in range(8)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"trainer.run_dir={tmp_path / 'run'}",
        f"data.train_files=[{prompts}]",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "data.apply_chat_template=false",
        "reward.function=exact_match",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"actor_rollout_ref.model.path={make_tiny(tmp_path / 'model', 'qwen2')}",
        f"{SERVER}.max_total_tokens=2048",
    ]


def start(module: str, overrides: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", module, *overrides]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@proof
def test_ctrl_c_before_the_first_step_ends_servers_and_trainer(tmp_path, overrides):
    run = start("launch.local", overrides)
    launcher, family = psutil.Process(run.pid), []
    deadline = time.monotonic() + 120
    while len(family) < 2 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)  # until there are a server and a trainer, which import for seconds
        family = launcher.children(recursive=True)
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=60)
    assert len(family) >= 2 and run.returncode == 130, error
    assert not [process for process in family if is_alive(process)]


def test_servers_that_cannot_start_are_blamed_with_their_log_and_the_trainer_is_ended(tmp_path, overrides, capfd):
    config = load_config(None, [*overrides, f"actor_rollout_ref.model.path={tmp_path}", f"{SERVER}.max_restarts=0"])
    assert run_local(config, [sys.executable, "-c", "import time; time.sleep(600)"]) == 1
    error = capfd.readouterr().err
    for part in ("The servers failed", "server-0", "server-0.log", "config.json"):
        assert part in error
    assert "trainer-rank-0 " not in error


def test_the_servers_of_a_node_tell_their_urls_and_not_their_key_and_end_on_sigterm(tmp_path, overrides):
    """As on the node of a job that serves the reward model too."""
    model = make_tiny_classifier(tmp_path / "classifier", "qwen2")
    first_port = str(free_port(2))
    options = ["--serve", "both", "--first-port", first_port, "--node", "a", "--log-dir", str(tmp_path / "logs")]
    run = start("launch.sglang_server", [*options, *overrides, f"reward.model.path={model}"])
    url, url_of_model = (run.stdout.readline().strip() for _ in range(2))
    family = psutil.Process(run.pid).children(recursive=True)
    shown = [f"{process.cmdline()} {process.environ()}" for process in family]
    run.terminate()
    _, error = run.communicate(timeout=60)
    assert run.returncode == 0 and url == f"http://127.0.0.1:{first_port}", error
    assert f"server-a-0 is healthy at {url}" in error
    assert int(url_of_model.rpartition(":")[2]) == int(first_port) + 1
    assert f"reward-model-a-0 is healthy at {url_of_model}" in error
    assert len(family) >= 6
    key = read_server_key(server_key_file(load_config(None, overrides)))
    assert not [text for text in shown if key in text]
    assert not [process for process in family if is_alive(process)]


def test_after_kill_9_and_after_ctrl_c_nothing_is_left_running_and_the_same_command_goes_on(
    tmp_path, overrides, monkeypatch
):
    arguments = [
        *overrides,
        "reward.function=exact_match",
        "trainer.total_training_steps=1000",
        "trainer.save_interval=1",
    ]
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    run = start("launch.local", arguments)
    metrics, checkpoints = (tmp_path / "run" / name for name in ("metrics.jsonl", "checkpoints"))
    wait_until(run, lambda: list(checkpoints.glob("step_*")))
    family = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    alive = psutil.wait_procs(family, timeout=60)[1]
    for process in alive:
        process.kill()
    run.communicate()
    assert len(family) >= 5, "server, scheduler, detokenizer, rank, controller"
    assert not alive, "they went on without their launcher"
    noted = shared_memory(tmp_path / "t")
    assert len(noted) == 1 and all(path.exists() for path in noted)

    again = start("launch.local", arguments)
    num_done = len(metrics.read_text().splitlines())
    wait_until(again, lambda: len(metrics.read_text().splitlines()) > num_done)
    family = psutil.Process(again.pid).children(recursive=True)
    again.send_signal(signal.SIGINT)
    output, error = again.communicate(timeout=300)
    assert again.returncode == SAVED_EXIT_CODE, error
    assert "Ctrl-C: the trainer saves, at the latest when its step ends, then all stops; a second signal" in error
    assert len(family) >= 5 and not [process for process in family if is_alive(process)]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and "Resumed after step" in output
    assert not any(path.exists() for path in noted)
    assert not list((tmp_path / "t").glob("dapo-server-*")) and not list((tmp_path / "t").glob("tmp????????"))


def wait_until(run: subprocess.Popen, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert condition() and run.poll() is None, run.communicate()


def shared_memory(temporary: Path) -> list[Path]:
    """Of all servers that have a folder there, as their supervisors have written it down."""
    lists = temporary.glob("dapo-server-*/.shared_memory")
    return [Path(line) for file in lists for line in file.read_text().splitlines()]
