"""Every family in a real server of two ranks: the same model as in transformers, before and after a
push. Those with the layers of others are proofs: other tests serve Qwen2, Qwen3, Mistral and the
mixtures of Qwen; GLM-4.5 has its shared expert, GLM-4.7-Flash a class of its own for all."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_dapo.servers.client import Generation
from megatron_dapo.servers.supervisor import ServerSupervisor
from tests.distributed.test_parity import hugging_face_log_probs
from tests.distributed.weight_sync_world import Ranks
from tests.e2e.test_mixture_server import EVERYTHING, PROMPT, generate, started_server, with_weights_of
from tests.e2e.weight_sync_trainer import rank_main
from tests.families import FAMILIES, own_layers
from tests.helpers import free_port
from tests.proofs import PROOFS
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

HIDDEN = 128  # experts are 64 wide: on CPUs SGLang pads widths that are no multiple of 32 on each rank
CHUNK = 16  # tokens of a prompt that are read at once: twice a window's
SERVER = "actor_rollout_ref.rollout.server"


SERVED = list(FAMILIES) if PROOFS else [*own_layers(), "glm4_moe", "glm4_moe_lite"]
# names Python code of the folder, as Kimi-K2's config.json does; nobody imports it
AUTO_MAP = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}


@pytest.fixture(scope="module", params=SERVED)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model_path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint labelled bfloat16, as the published ones;
    servers of a CPU compute in float32."""
    path = make_tiny(tmp_path_factory.mktemp(family), family, vocab=65, layers=2, hidden=HIDDEN)
    config = json.loads((path / "config.json").read_text())
    code = {"auto_map": AUTO_MAP} if family == "deepseek_v3" else {}
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"} | code))
    return path


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSupervisor]:
    """Of two tensor-parallel ranks."""
    chunked = f"{SERVER}.extra_args=[--chunked-prefill-size, '{CHUNK}']"
    two_ranks = f"{SERVER}.tensor_model_parallel_size=2"
    with started_server(model_path, tmp_path_factory.mktemp("logs"), chunked, two_ranks) as supervisor:
        supervisor.wait_healthy()
        yield supervisor


def test_the_server_answers_as_transformers_do_with_the_checkpoint_and_with_what_was_pushed(
    family, model_path, server, tmp_path
):
    config = dict(bucket_size_mb=1, timeout_s=60, verify=True, verify_num_tensors=EVERYTHING)
    sizes = {"tp": 2, "sp": True, **({"ep": 2} if FAMILIES[family].is_mixture else {})}
    arguments = (free_port(), 2, sizes, str(model_path), server.overrides(), {}, config)
    with Ranks(rank_main, 2, *arguments) as trainer:
        trainer.order("open")
        for version in (0, 150):
            if version:
                answers = trainer.order(version)
                assert [status for status, _ in answers] == ["ok", "ok"], answers
                assert answers[0][1].num_verified == FAMILIES[family].num_served
            oracle = with_weights_of(version, model_path, tmp_path / str(version))
            answer = check(server, PROMPT, oracle)
            # begins with cached tokens, goes on for several chunks
            again = check(server, [*PROMPT, *answer.tokens.tolist(), *range(5, 5 + 3 * CHUNK)], oracle)
            assert again.num_cached_tokens >= len(PROMPT)


def check(server: ServerSupervisor, prompt: list[int], oracle: Path) -> Generation:
    answer = asyncio.run(generate(server, prompt))
    (expected,) = hugging_face_log_probs(oracle, [[*prompt, *answer.tokens]])
    # the bound of the end-to-end tests: server and transformers round differently
    got = torch.tensor(answer.log_probs).double()
    torch.testing.assert_close(got, expected[len(prompt) - 1 :], rtol=0, atol=1e-4)
    return answer
