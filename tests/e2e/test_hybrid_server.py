"""Real servers of gated delta nets: a state follows the weights, each tensor of a push is compared,
and routers' experts are told."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.huggingface.model_families import FAMILIES as SUPPORTED
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.servers.client import FOREIGN_VERSION, ExpertQuestion, SamplingParams, SGLangClient
from megatron_dapo.storage.server_key import read_server_key
from megatron_dapo.weight_sync.checksum import checksum, server_parameters, server_tensor
from tests.distributed.test_parity import hugging_face_log_probs
from tests.e2e.test_mixture_server import started_server, with_weights_of
from tests.e2e.test_sleeping_server import push
from tests.e2e.test_weight_sync_servers import PROMPT, LongResponse
from tests.e2e.weight_sync_trainer import changed
from tests.families import FAMILIES, ROUNDINGS
from tests.tiny_models import make_tiny
from tests.unit.test_weight_sync_plan import as_specs

pytestmark = pytest.mark.e2e

HYBRIDS = [name for name, row in FAMILIES.items() if SUPPORTED[row.model.__name__].has_delta_net]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Server:
    """A server of one rank, and its checkpoint."""

    url: str
    key: str
    family: str
    model: Path

    def ask(self, question: Callable[[SGLangClient], Awaitable[Answer]]) -> Answer:
        async def run() -> Answer:
            async with SGLangClient(self.url, self.key) as client:
                return await question(client)

        return asyncio.run(run())

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        tensors = load_file(self.model / "model.safetensors")
        return {name: changed(tensor, version) for name, tensor in tensors.items()}

    def expected_checksums(self, version: int) -> dict[str, str]:
        """Of all parameters, and of the sums 1 + weight that norms keep."""
        tensors = self.weights(version)
        model = json.loads((self.model / "config.json").read_text())
        parameters = server_parameters(as_specs(tensors, model))
        served = {
            name: server_tensor(specs, [tensors[spec.name] for spec in specs], 0, 1)
            for name, specs in parameters.items()
        }
        norms = [name for name in served if name.endswith("norm.weight") and "linear_attn" not in name]
        served |= {name.replace(".weight", ".gemma_weight"): 1 + served[name] for name in norms}
        return {name: checksum(tensor) for name, tensor in served.items()}


@pytest.fixture(scope="module", params=HYBRIDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny(folder / "model", request.param, vocab=65, layers=4)
    experts = ["actor_rollout_ref.actor.router_replay=rollout"] if FAMILIES[request.param].is_mixture else []
    with started_server(model, folder, *experts) as supervisor:
        supervisor.wait_healthy()
        yield Server(supervisor.urls[0], read_server_key(supervisor.key_file), request.param, model)


@pytest.mark.parametrize("server", [name for name in HYBRIDS if FAMILIES[name].is_mixture], indirect=True)
def test_the_experts_of_all_tokens_are_those_of_transformers(server):
    shape = RouterShape.of(read_model_spec(server.model))
    prompt, sampling = [5, 6, 7, 9, 20], SamplingParams(max_new_tokens=24)
    answer = server.ask(lambda client: client.generate(prompt, sampling, 60.0, experts=ExpertQuestion(shape)))
    tokens = [*prompt, *answer.tokens.tolist()]
    model = AutoModelForCausalLM.from_pretrained(
        server.model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    chosen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))  # the last one was read by nobody
    experts = torch.from_numpy(answer.routed_experts).view(len(tokens) - 1, len(chosen), -1)
    assert torch.equal(experts.sort(-1)[0].long(), torch.stack(chosen, dim=1).sort(-1)[0])


def test_each_token_of_a_response_over_a_push_has_the_log_prob_of_its_weights(server, tmp_path):
    """The state of the tokens so far is computed again."""

    async def push_new_weights(client: SGLangClient) -> None:
        await client.pause("retract")
        await push(client, server.weights(150), 1)
        await client.continue_()

    response = LongResponse(server.url, server.key)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(response.read)
        for _ in range(3):
            response.wait()
        server.ask(push_new_weights)
        response.wait()
        response.stop()
        answer = reading.result()
    is_new = torch.from_numpy(answer.weight_versions == 1)
    assert {*answer.weight_versions.tolist()} == {FOREIGN_VERSION, 1} and answer.num_retractions == 1
    tokens = [*PROMPT, *answer.tokens.tolist()]
    folders = [with_weights_of(version, server.model, tmp_path / str(version)) for version in (0, 150)]

    def by_labels(is_new: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        old, new = (hugging_face_log_probs(folder, [tokens], dtype)[0][len(PROMPT) - 1 :] for folder in folders)
        return torch.where(is_new, new, old)

    exact, got = by_labels(is_new), torch.from_numpy(answer.log_probs)
    bound = ROUNDINGS * (by_labels(is_new, torch.float32) - exact).abs().max()
    difference = (got - exact).abs().max()
    print(f"{server.family}: at most {difference:.1e} of {bound:.1e}, {int(is_new.sum())} of {len(is_new)} tokens new")
    assert difference < bound < (got - by_labels(~is_new)).abs().median(), "a wrong label would be seen"


def test_every_parameter_of_a_server_is_compared_after_a_push(server):
    """And equals the trainer's, in the server's form and under the server's name."""

    async def pushed(client: SGLangClient) -> tuple[dict[str, str], ...]:
        await push(client, server.weights(200), 1)
        return await client.checksums()

    (sums,) = server.ask(pushed)
    # beside the weights, a table of the published settings' axes of positions
    weights = {name: value for name, value in sums.items() if not name.endswith("rotary_emb.axis_map")}
    assert weights == server.expected_checksums(200)


@pytest.mark.parametrize("server", [name for name in HYBRIDS if name != "qwen3_next"], indirect=True)
def test_a_tensor_under_a_name_that_the_server_drops_is_found_by_its_checksum(server):
    """Of Qwen3-Next it refuses such a name."""
    name = "model.layers.0.linear_attn.A_log"
    tensors = server.weights(250)
    tensors["model.language_model.layers.0.linear_attn.A_log"] = tensors.pop(name)  # as in the image model

    async def pushed(client: SGLangClient) -> tuple[dict[str, str], ...]:
        await push(client, tensors, 1)  # without an error
        return await client.checksums()

    (sums,) = server.ask(pushed)
    expected = server.expected_checksums(250)
    assert [parameter for parameter in expected if sums[parameter] != expected[parameter]] == [name]
