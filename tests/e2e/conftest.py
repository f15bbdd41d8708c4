"""One real SGLang server for all tests of this folder that can share it."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import read_server_key
from tests.browser import Browser
from tests.forked_ranks import run_ranks
from tests.forked_servers import forked_servers, own_nurseries
from tests.helpers import REPOSITORY
from tests.tiny_models import make_tiny

# a run on a CPU needs none: without cpu_server.NOTHING_COMPILED servers would
os.environ["CXX"] = "/no/compiler"
# in the first process of a test run, so that all its workers have the same ones
own_nurseries()


@dataclass(frozen=True)
class RunningServer:
    """model_path: the checkpoint of the expected answers; served after a conversion and back. key:
    the key that everyone must bring."""

    url: str
    key: str
    model_path: Path
    supervisor: ServerSupervisor


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A healthy server of a tiny Qwen2 model (vocabulary 64) in the files of megatron_to_hf,
    several of them. Tests leave its weights as they are."""
    folder = tmp_path_factory.mktemp("server")
    model_path = make_tiny(folder / "model", "qwen2")
    served = _there_and_back(model_path, folder)
    (served / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    rollout = "actor_rollout_ref.rollout.server"
    model, run = f"actor_rollout_ref.model.path={served}", f"trainer.run_dir={folder}/run"
    config = load_config(None, [model, run, f"{rollout}.startup_timeout_s=200.0"])
    supervisor = ServerSupervisor(config, folder)
    with forked_servers():
        supervisor.start()
    try:
        supervisor.wait_healthy()
        yield RunningServer(supervisor.urls[0], read_server_key(supervisor.key_file), model_path, supervisor)
    finally:
        supervisor.stop()


def converted(model_path: Path, out: Path) -> Path:
    """The model in the files of `hf_to_megatron`, a possible start of a run."""
    _convert(out.with_suffix(".json"), ["hf_to_megatron", ["--hf-model", str(model_path), "--output", str(out)]])
    return out


def _there_and_back(model_path: Path, folder: Path) -> Path:
    megatron, back = folder / "megatron", folder / "converted"
    _convert(
        folder / "convert.json",
        ["hf_to_megatron", ["--hf-model", str(model_path), "--output", str(megatron)]],
        ["megatron_to_hf", ["--checkpoint", str(megatron), "--output", str(back), "--max-file-size", "200KB"]],
    )
    assert len(list(back.glob("model-0000*.safetensors"))) > 2
    return back


def _convert(task: Path, *commands: list) -> None:
    """Run programs of checkpoints_tools with their arguments, written to `task`, in a fork."""
    task.write_text(json.dumps(commands))
    run_ranks(REPOSITORY / "tests" / "distributed" / "convert_worker.py", 1, str(task))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
