"""A mixture of experts spread over trainer ranks, and a real server of it: one model before and
after a push."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.config.loader import load_config
from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.servers.client import Generation, SamplingParams, SGLangClient
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import read_server_key
from tests.distributed.test_parity import hugging_face_log_probs
from tests.distributed.weight_sync_world import Ranks
from tests.e2e.weight_sync_trainer import changed, rank_main
from tests.families import MODULES
from tests.forked_servers import forked_servers
from tests.helpers import free_port
from tests.peft_adapters import make_adapter, merged_checkpoint
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

PROMPT = [5, 6, 7, 9, 20]
EVERYTHING = 10_000


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mixture") / "model", "qwen3_moe", vocab=65, layers=2)


@contextmanager
def started_server(model_path: Path, logs: Path, *overrides: str) -> Iterator[ServerSupervisor]:
    """Of this model; it may not answer yet."""
    rollout = "actor_rollout_ref.rollout.server"
    config = load_config(
        None,
        [
            f"actor_rollout_ref.model.path={model_path}",
            f"trainer.run_dir={logs}/run",
            f"{rollout}.max_total_tokens=2048",
            f"{rollout}.startup_timeout_s=300.0",
            *overrides,
        ],
    )
    supervisor = ServerSupervisor(config, logs)
    with forked_servers():
        supervisor.start()
        try:
            yield supervisor
        finally:
            supervisor.stop()


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSupervisor]:
    with started_server(model_path, tmp_path_factory.mktemp("logs")) as supervisor:
        supervisor.wait_healthy()
        yield supervisor


async def generate(server: ServerSupervisor, prompt: Sequence[int] = PROMPT) -> Generation:
    async with SGLangClient(server.urls[0], read_server_key(server.key_file)) as client:
        return await client.generate(prompt, SamplingParams(max_new_tokens=24, temperature=1.0), timeout_s=60)


def with_weights_of(version: int, model_path: Path, folder: Path) -> Path:
    """The checkpoint with the trainer's weights of this version, the sinks rounded as a server of
    gpt-oss rounds them."""
    shutil.copytree(model_path, folder)
    tensors = load_file(model_path / "model.safetensors")
    tensors = {name: changed(tensor, version) for name, tensor in tensors.items()}
    sinks = {name: tensor.bfloat16().float() for name, tensor in tensors.items() if name.endswith(".sinks")}
    save_file(tensors | sinks, folder / "model.safetensors")
    return folder


def test_the_server_answers_as_transformers_do_with_the_checkpoint_and_with_what_was_pushed(
    model_path, server, tmp_path
):
    config = dict(bucket_size_mb=1, timeout_s=60, verify=True, verify_num_tensors=EVERYTHING)
    arguments = (free_port(), 2, {"tp": 2, "sp": True, "ep": 2}, str(model_path), server.overrides(), {}, config)
    with Ranks(rank_main, 2, *arguments) as trainer:
        trainer.order("open")
        # the second: weights 15 % larger, so that other answers are likely
        for version in (0, 150):
            if version:
                answers = trainer.order(version)
                assert [status for status, _ in answers] == ["ok", "ok"], answers
                # per layer: q, k and v in one, o, their norms q and k, two norms, the router, two
                # of all experts
                assert answers[0][1].num_verified == 2 * 9 + 3
            answer = asyncio.run(generate(server))
            oracle = with_weights_of(version, model_path, tmp_path / str(version))
            (expected,) = hugging_face_log_probs(oracle, [[*PROMPT, *answer.tokens]])
            # the bound of the end-to-end tests: server and transformers round differently
            torch.testing.assert_close(
                torch.tensor(answer.log_probs).double(), expected[len(PROMPT) - 1 :], rtol=0, atol=1e-4
            )
            assert set(answer.weight_versions) == {version or -1}


def test_the_server_gets_adapters_merged_with_the_weights_of_attention_and_experts(model_path, server, tmp_path):
    lora = LoraSettings(rank=4, alpha=8.0, targets=MODULES, seed=1)
    tensors = make_adapter(tmp_path / "adapter", model_path, lora.rank, lora.alpha)
    config = dict(bucket_size_mb=1, timeout_s=60, verify=True, verify_num_tensors=EVERYTHING)
    arguments = (free_port(), 2, {"tp": 2, "sp": True, "ep": 2}, str(model_path), server.overrides(), {}, config)
    with Ranks(rank_main, 2, *arguments, (str(tmp_path / "adapter"), lora)) as trainer:
        trainer.order("open")
        answers = trainer.order(300)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_verified == 2 * 9 + 3
    answer = asyncio.run(generate(server))
    oracle = merged_checkpoint(tmp_path / "merged", model_path, tensors, lora.scale)
    (expected,) = hugging_face_log_probs(oracle, [[*PROMPT, *answer.tokens]])
    torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected[len(PROMPT) - 1 :], rtol=0, atol=1e-4)
    assert set(answer.weight_versions) == {300}
