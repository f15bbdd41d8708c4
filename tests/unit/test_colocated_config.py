"""Trainer and servers on the same GPUs: contradictions are refused, options of servers follow."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.checks.colocated_checks import REFUSED_ASLEEP
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import servers_per_node, shares_gpus
from megatron_dapo.config.loader import load_config
from megatron_dapo.servers import server_command
from megatron_dapo.servers.server_command import assign_gpus, sglang_command
from tests.config_overrides import mistakes, overrides
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

ON = "actor_rollout_ref.hybrid_engine=true"
SERVER = "actor_rollout_ref.rollout.server"
OFF = "set hybrid_engine to false"

# overrides beside hybrid_engine -> words of the one sentence, the cure among them
REFUSED = [
    ("rollout.max_staleness=1 rc.rollout_is=token", ["max_staleness is 1", "set max_staleness to 0"]),
    ("rollout.server.nnodes=1", ["server.nnodes is 1", "set nnodes to 0"]),
    ("rollout.server.num_servers=2", ["num_servers 2 x tensor_model_parallel_size 1 is 2", "num_servers to 1"]),
    ("trainer.n_procs_per_node=4 rollout.server.tensor_model_parallel_size=2",
     ["num_servers 1 x tensor_model_parallel_size 2 is 2", "the trainer's 4 GPUs", "num_servers to 2"]),
    ("trainer.nnodes=2 trainer.n_procs_per_node=4 rollout.server.num_servers=4",
     ["the trainer's 8 GPUs", "trainer.nnodes 2 x trainer.n_procs_per_node 4", "num_servers to 8"]),
    ("trainer.n_procs_per_node=6 pp=6 rollout.server.tensor_model_parallel_size=4",
     ["tensor_model_parallel_size is 4", "divide trainer.n_procs_per_node 6", "does not span nodes"]),
    ("trainer.n_procs_per_node=4 rollout.server.num_servers=2 rollout.server.tensor_model_parallel_size=2"
     " rollout.server.nodes_per_server=2", ["nodes_per_server is 2", "set nodes_per_server to 1"]),
    ("reward.model.path=/models/judge", ["reward.model.path is /models/judge", "give reward.model.url"]),
    ("rollout.server.extra_args=[--load-format,flash_rl]", ["--load-format flash_rl", "--quantization out"]),
    ("rollout.server.extra_args=[--load-format=flash_rl]", ["--load-format flash_rl", "--quantization out"]),
    ("rollout.server.extra_args=[--speculative-algorithm,EAGLE]", ["--speculative-algorithm", "draft", "leave it out"]),
    ("rollout.server.extra_args=[--enable-mem]", ["--enable-mem", "leave it out"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_contradiction_to_shared_gpus_is_one_sentence_with_key_value_and_cure(text, words):
    (sentence,) = mistakes(f"{ON} {text}")
    assert all(word in sentence for word in [*words, "hybrid_engine true", OFF]), sentence


@pytest.mark.parametrize("option", REFUSED_ASLEEP)
def test_an_option_with_which_a_server_cannot_sleep_is_refused(option):
    (sentence,) = mistakes(f"{ON} rollout.server.extra_args=[{option}=7]")
    assert option in sentence and REFUSED_ASLEEP[option] in sentence


@pytest.mark.parametrize(
    "text",
    [
        "",
        "trainer.n_procs_per_node=4 rollout.server.num_servers=2 rollout.server.tensor_model_parallel_size=2",
        "trainer.nnodes=2 trainer.n_procs_per_node=4 rollout.server.num_servers=8",
        "reward.model.path=/models/judge reward.model.url=http://judge:1",
        # in the config of the ranks they are the launcher's
        "rollout.server_urls=[http://127.0.0.1:1]",
        "rollout.server_urls_file=/run/servers.txt",
        "rollout.server.extra_args=[--enable-metrics,--cuda-graph-bs-decode,'8',--load-format,auto]",
        # no server at all
        "trainer.synthetic_batch=true rollout.server.num_servers=2",
    ],
)
def test_what_shared_gpus_allow(text):
    assert mistakes(f"{ON} {text}") == []


def test_without_the_key_none_of_it_is_refused():
    for text, _ in REFUSED:
        assert not [sentence for sentence in mistakes(text) if "hybrid_engine" in sentence], text


@pytest.fixture
def on_gpus(tmp_path, monkeypatch):
    """on_gpus(text, **variables): the mistakes on a machine with GPUs and these variables."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL_JSON))
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "version").touch()
    monkeypatch.setattr("megatron_dapo.common.nvidia_driver.VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr("megatron_dapo.checks.machine_checks.importlib.util.find_spec", lambda name: name)
    listed("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n", monkeypatch)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def found(text: str = ON, **variables: str) -> list[str]:
        files = [f"data.train_files=[{tmp_path}/train.jsonl]", f"actor_rollout_ref.model.path={tmp_path}/model"]
        with monkeypatch.context() as changed:
            for name, value in variables.items():
                changed.setenv(name, value)
            try:
                validate(load_config(None, [*files, "data.val_files=[]", *overrides(text)]), MODEL_JSON)
            except UserError as error:
                return error.sentences
        return []

    return found


def listed(lines: str | OSError, monkeypatch) -> None:
    """Have `nvidia-smi -L` print these lines, or fail to start."""

    def run(command, **_):
        assert command == ["nvidia-smi", "-L"]
        if isinstance(lines, OSError):
            raise lines
        return SimpleNamespace(stdout=lines)

    stand_in = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(nvidia_driver, "subprocess", stand_in)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_either_variable(on_gpus, name):
    value = "max_split_size_mb:512,expandable_segments:True"
    (sentence,) = on_gpus(**{name: value})
    assert f"{name} is {value}" in sentence and "out of the variable" in sentence and OFF in sentence
    assert on_gpus(**{name: "expandable_segments:False"}) == []
    assert on_gpus("", **{name: value}) == []


def test_divided_gpus_are_refused_by_their_names_and_by_the_drivers_list(on_gpus, monkeypatch):
    (sentence,) = on_gpus(CUDA_VISIBLE_DEVICES="GPU-1, MIG-7")
    assert "hybrid_engine true" in sentence and "MIG-7" in sentence and "whole ones" in sentence
    listed("GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 3g.20gb     Device  0: (UUID: MIG-2)\n", monkeypatch)
    for variables in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        (sentence,) = on_gpus(**variables)
        assert "MIG 3g.20gb" in sentence
    assert on_gpus(CUDA_VISIBLE_DEVICES="GPU-1") == [], "a whole one beside a divided one"
    listed(FileNotFoundError("nvidia-smi"), monkeypatch)
    assert on_gpus() == []


def test_a_machine_without_gpus_is_not_asked_for_them(on_gpus, monkeypatch):
    monkeypatch.setattr("megatron_dapo.common.nvidia_driver.VERSION_FILE", Path("/nowhere"))
    assert on_gpus(PYTORCH_ALLOC_CONF="expandable_segments:True", CUDA_VISIBLE_DEVICES="MIG-7") == []


def command(*more: str, gpus: tuple[str, ...] = ("0",)) -> server_command.ServerCommand:
    config = load_config(None, ["actor_rollout_ref.model.path=some/model", "trainer.run_dir=/run", *more])
    return sglang_command(config, "127.0.0.1", 31000, list(gpus))


def test_a_cpu_server_can_sleep_and_knows_its_imagined_gpus():
    made = command(ON, gpus=("2", "3"))
    assert "--enable-memory-saver" in made.command
    wanted = {"MEGATRON_DAPO_LEDGER": "/run/ledger", "MEGATRON_DAPO_LEDGER_GPUS": "2,3"}
    assert wanted.items() <= made.environment.items()
    apart = command(gpus=("2", "3"))
    assert "--enable-memory-saver" not in apart.command and not apart.environment.keys() & wanted.keys()


def test_a_gpu_server_puts_its_graphs_to_sleep_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = command(ON)
    words = " ".join(made.command)
    assert "--enable-memory-saver" in words and "--cuda-graph-backend-prefill disabled" in words
    assert made.environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert "MEGATRON_DAPO_LEDGER" not in made.environment
    apart = command()
    assert "memory-saver" not in " ".join(apart.command) and "cuda-graph" not in " ".join(apart.command)
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in apart.environment


def test_the_installed_sglang_knows_the_options_of_a_sleeping_server():
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    sources = Path(package) / "srt"
    fields = (sources / "arg_groups" / "fields" / "exec_.py").read_text()
    for name in ("enable_memory_saver", "cuda_graph_backend_prefill", "enable_weights_cpu_backup", "debug_cuda_graph"):
        assert re.search(rf"^    {name}: A\[", fields, re.MULTILINE), name
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" in (sources / "environ.py").read_text()
    # of a breakable graph, the default for prompts
    refusal = (sources / "model_executor" / "runner_backend" / "breakable_cuda_graph_backend.py").read_text()
    assert "not compatible with memory saver mode" in refusal


def test_servers_fill_the_gpus_of_the_ranks_from_the_first_one_on(monkeypatch):
    assert assign_gpus(2, 2, 0) == [["0", "1"], ["2", "3"]]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    assert assign_gpus(2, 2, 0) == [["7", "6"], ["5", "4"]]


def test_the_servers_of_several_nodes_are_divided_among_the_trainers_nodes():
    sizes = ["trainer.nnodes=2", "trainer.n_procs_per_node=4", f"{SERVER}.num_servers=8"]
    assert servers_per_node(load_config(None, [*sizes, ON])) == 4
    assert servers_per_node(load_config(None, sizes)) == 8
    assert not shares_gpus(load_config(None, [*sizes, ON, "trainer.synthetic_batch=true"]))
