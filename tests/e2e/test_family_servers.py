"""Families whose layers differ, in a real server: the same model as in transformers, before and after a push."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from megatron_dapo.servers.client import Generation
from megatron_dapo.servers.supervisor import ServerSupervisor
from tests.distributed.test_parity import hugging_face_log_probs
from tests.distributed.weight_sync_world import Ranks
from tests.e2e.test_mixture_server import EVERYTHING, PROMPT, generate, started_server, with_weights_of
from tests.e2e.weight_sync_trainer import rank_main
from tests.helpers import free_port
from tests.tiny_models import MIXTURES, make_tiny

pytestmark = pytest.mark.e2e

CHUNK = 16  # tokens of a prompt that are read at once: twice a window's
SERVER = "actor_rollout_ref.rollout.server"
# of two layers and besides: parameters of a server, which has q, k and v, and gate and up, in one
NUM_TENSORS = {
    "glm4": 2 * (2 + 1 + 2 + 4) + 3,
    "gemma3": 2 * (1 + 2 + 1 + 2 + 4) + 2,
    # a dense layer; one with a router, its bias, and two each of all experts and of the shared one
    "glm4_moe": (2 + 1 + 2 + 2) + (2 + 1 + 2 + 2 + 2 + 2) + 3,
    # a layer's attention: both vectors' and keys' product in one, two norms, two products of the vectors, o
    "deepseek_v3": (1 + 2 + 2 + 1 + 2 + 2) + (1 + 2 + 2 + 1 + 2 + 2 + 2 + 2) + 3,
    # qkv, o and the router with biases, sinks, two norms, two of all experts with biases
    "gpt_oss": 2 * (2 + 2 + 2 + 1 + 2 + 4) + 3,
}


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of checkpoints that are said to be in bfloat16, as the published ones; servers of a CPU compute in float32."""
    folder = tmp_path_factory.mktemp("models")
    paths = {family: make_tiny(folder / family, family, vocab=65, layers=2) for family in NUM_TENSORS}
    for path in paths.values():
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return paths


@pytest.fixture(scope="module")
def servers(
    model_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerSupervisor]]:
    """One for each family; they start at the same time."""
    logs = tmp_path_factory.mktemp("logs")
    chunked = f"{SERVER}.extra_args=[--chunked-prefill-size, '{CHUNK}']"
    with ExitStack() as stack:
        started = {
            family: stack.enter_context(started_server(path, logs / family, chunked))
            for family, path in model_paths.items()
        }
        for supervisor in started.values():
            supervisor.wait_healthy()
        yield started


@pytest.mark.parametrize("family", NUM_TENSORS)
def test_the_server_answers_as_transformers_do_with_the_checkpoint_and_with_what_was_pushed(
    family, model_paths, servers, tmp_path
):
    config = dict(bucket_size_mb=1, timeout_s=60, verify=True, verify_num_tensors=EVERYTHING)
    model_path, server = model_paths[family], servers[family]
    sizes = {"tp": 2, "sp": True, **({"ep": 2} if family in MIXTURES else {})}
    arguments = (free_port(), 2, sizes, str(model_path), server.overrides(), {}, config)
    with Ranks(rank_main, 2, *arguments) as trainer:
        trainer.order("open")
        for version in (0, 150):
            if version:
                answers = trainer.order(version)
                assert [status for status, _ in answers] == ["ok", "ok"], answers
                assert answers[0][1].num_verified == NUM_TENSORS[family]
            oracle = with_weights_of(version, model_path, tmp_path / str(version))
            answer = check(server, PROMPT, oracle)
            # begins with what is cached, goes on for several chunks
            again = check(server, [*PROMPT, *answer.tokens.tolist(), *range(5, 5 + 3 * CHUNK)], oracle)
            assert again.num_cached_tokens >= len(PROMPT)


def check(server: ServerSupervisor, prompt: list[int], oracle: Path) -> Generation:
    answer = asyncio.run(generate(server, prompt))
    (expected,) = hugging_face_log_probs(oracle, [[*prompt, *answer.tokens]])
    # the bound of the end-to-end tests: server and transformers round differently
    got = torch.tensor(answer.log_probs).double()
    torch.testing.assert_close(got, expected[len(prompt) - 1 :], rtol=0, atol=1e-4)
    return answer
