"""A real SGLang server on the CPU: it answers as transformers does, in token ids."""

import asyncio
import math

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from megatron_dapo.servers.client import Generation, SamplingParams, SGLangClient
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.servers.speedometer import Load
from tests.tiny_models import EOS_ID

pytestmark = pytest.mark.e2e

PROMPTS = ([4, 5, 13, 6, 17], [9], list(range(3, 60)), [7, 7, 7, 8])
TIMEOUT_S = 60.0


def ask(server, question):
    """The result of `question(client)`."""

    async def run():
        async with SGLangClient(server.url, server.key) as client:
            return await question(client)

    return asyncio.run(run())


def generate(server, prompts, sampling: SamplingParams) -> list[Generation]:
    async def all_at_once(client: SGLangClient):
        return await asyncio.gather(*(client.generate(prompt, sampling, TIMEOUT_S) for prompt in prompts))

    return ask(server, all_at_once)


@pytest.fixture(scope="module")
def model(server):
    return AutoModelForCausalLM.from_pretrained(server.model_path).eval()


def log_probs(model, prompt, tokens, temperature: float = 1.0) -> list[float]:
    """transformers' log-probs of `tokens` after `prompt`."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_greedy_tokens_are_those_of_transformers(server, model):
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0)
    for prompt, generation in zip(PROMPTS, generate(server, PROMPTS, sampling), strict=True):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        assert list(generation.tokens) == tokens


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_sampled_tokens_are_those_of_transformers_at_that_temperature(server, model, temperature):
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature)
    # some 30 in flight, with shared prefixes
    prompts = [prompt for prompt in PROMPTS for _ in range(8)]
    for prompt, generation in zip(prompts, generate(server, prompts, sampling), strict=True):
        expected = log_probs(model, prompt, list(generation.tokens), temperature)
        assert max(abs(a - b) for a, b in zip(generation.log_probs, expected, strict=True)) < 1e-4


def test_a_response_ends_with_a_stop_token_or_at_the_length(server):
    sampling = SamplingParams(max_new_tokens=20, stop_token_ids=(EOS_ID, 10, 11, 12, 13, 14))
    generations = generate(server, [[5, 6]] * 32, sampling)
    assert {generation.finish_reason for generation in generations} == {"stop", "length"}
    for generation in generations:
        inner, last = generation.tokens[:-1], generation.tokens[-1]
        assert not set(inner) & set(sampling.stop_token_ids)
        assert (last in sampling.stop_token_ids) == (generation.finish_reason == "stop")
        if generation.finish_reason == "length":
            assert len(generation.tokens) == 20


def test_sampling_follows_the_distribution(server, model):
    first = [g.tokens[0] for g in generate(server, [[4, 5, 13]] * 600, SamplingParams(max_new_tokens=1))]
    with torch.no_grad():
        expected = model(torch.tensor([[4, 5, 13]])).logits[0, -1].softmax(-1)
    counted = torch.bincount(torch.tensor(first), minlength=len(expected)) / len(first)
    assert (counted - expected).abs().max() < 5 * math.sqrt(0.25 / len(first))


def test_every_token_carries_the_version_of_its_weights(server):
    async def name_and_generate(client: SGLangClient):
        await client.post("/update_weight_version", {"new_version": "3", "abort_all_requests": False})
        generation = await client.generate([5], SamplingParams(max_new_tokens=4), TIMEOUT_S)
        return await client.weight_version(), generation

    version, generation = ask(server, name_and_generate)
    assert version == 3 and set(generation.weight_versions) == {3}


def test_a_paused_server_goes_on_where_it_was(server, model):
    async def pause_in_the_middle(client: SGLangClient):
        sampling = SamplingParams(max_new_tokens=300, stop_token_ids=(), temperature=0.5)
        running = [asyncio.create_task(client.generate([8, 9], sampling, TIMEOUT_S)) for _ in range(8)]
        await asyncio.sleep(0.15)
        await client.pause("retract")
        try:
            await client.post("/flush_cache", {})
            # SGLang calls a paused server not ready; it is none the less well
            await client.check_health()
            assert await client.is_paused()
        finally:
            await client.resume()
        assert not await client.is_paused()
        return await asyncio.gather(*running)

    for generation in ask(server, pause_in_the_middle):
        expected = log_probs(model, [8, 9], list(generation.tokens), temperature=0.5)
        assert max(abs(a - b) for a, b in zip(generation.log_probs, expected, strict=True)) < 1e-4


def test_a_paused_servers_scheduler_sleeps(server):
    """SGLang's own takes a whole core."""
    if torch.cuda.is_available():
        pytest.skip("the adaptation is of CPU servers")

    def cpu_s() -> float:
        (pid,) = server.supervisor.pids()
        times = [process.cpu_times() for process in psutil.Process(pid).children(recursive=True)]
        return sum(time.user + time.system for time in times)

    async def paused(client: SGLangClient) -> float:
        await client.pause("retract")
        try:
            before = cpu_s()
            await asyncio.sleep(1.0)
            return cpu_s() - before
        finally:
            await client.continue_()

    assert ask(server, paused) < 0.1


def test_an_aborted_request_returns_what_there_is_and_no_other_one_ends(server, model):
    async def abort(client: SGLangClient, number: int):
        sampling = SamplingParams(max_new_tokens=400, temperature=0.0)
        kept, ended = (
            asyncio.create_task(client.generate([4, 4, 4], sampling, TIMEOUT_S, request_id=f"{letter}{number:031}"))
            for letter in "ab"
        )
        # on a busy machine the first comes before the request that it is about
        while not ended.done():
            await asyncio.sleep(0.1)
            await client.abort(f"b{number:031}")
        return await kept, await ended

    for number in range(20):
        kept, ended = ask(server, lambda client, number=number: abort(client, number))
        assert kept.finish_reason != "abort" and ended.finish_reason in ("abort", kept.finish_reason)
        assert ended.tokens.tolist() == kept.tokens[: len(ended.tokens)].tolist()
        assert len(ended.weight_versions) == len(ended.tokens)
        # else it was aborted before its first token, or had ended
        if 0 < len(ended.tokens) < len(kept.tokens):
            break
    assert ended.finish_reason == "abort" and 0 < len(ended.tokens) < len(kept.tokens)
    expected = log_probs(model, [4, 4, 4], list(ended.tokens))
    assert max(abs(a - b) for a, b in zip(ended.log_probs, expected, strict=True)) < 1e-4


def test_a_server_tells_how_full_its_cache_is_and_how_many_requests_it_runs(server):
    async def read(client: SGLangClient):
        sampling = SamplingParams(max_new_tokens=400, temperature=0.0)
        busy = Load(0.0, 0.0, None)
        # its scheduler tells of itself now and then, perhaps not during the first of them
        for number in range(50):
            running = asyncio.create_task(client.generate([4, 4, 4], sampling, TIMEOUT_S, request_id=f"c{number:031}"))
            while not running.done() and not busy.requests_used:
                busy = await client.load()
            await running
            if busy.requests_used:
                break
        info = await client.server_info()
        return busy, info["max_total_num_tokens"], info["max_running_requests"]

    busy, capacity, most = ask(server, read)
    assert 0 < busy.kv_used <= 403 / capacity and busy.requests_used == 1 / most


def test_a_prefix_is_in_the_cache_for_requests_of_its_salt_alone(server):
    async def read(client: SGLangClient):
        prompt, sampling = [5, *range(3, 43)], SamplingParams(max_new_tokens=1)
        return [
            (await client.generate(prompt, sampling, TIMEOUT_S, cache_salt=salt)).num_cached_tokens
            for salt in ("1", "1", "2", "1", None)
        ]

    first, again, other, once_more, unsalted = ask(server, read)
    assert first == other == unsalted == 0 and again == once_more > 30


def test_a_prompt_beyond_the_context_is_refused_with_the_servers_words(server):
    with pytest.raises(ServerError, match="/generate: HTTP 400.*length"):
        generate(server, [[5] * 3000], SamplingParams(max_new_tokens=1))


def test_checksums_cover_the_weights(server):
    (sums,) = ask(server, lambda client: client.checksums())
    assert "model.embed_tokens.weight" in sums and len(set(sums.values())) > 20


def test_the_processes_of_a_server_are_forks_of_it(server):
    """Spawned, they would have the helper process of Python's multiprocessing beside them."""
    (pid,) = server.supervisor.pids()
    children = psutil.Process(pid).children(recursive=True)
    assert sorted(child.cmdline()[0] for child in children) == ["sglang::detokenizer", "sglang::scheduler"]


def test_strangers_are_refused_on_every_route_that_the_server_has(server):
    """Without a key, and with a wrong one; nothing that they ask for is done."""
    headers = {"Authorization": f"Bearer {server.key}"}
    routes = requests.get(f"{server.url}/openapi.json", headers=headers, timeout=TIMEOUT_S).json()["paths"]
    assert {"/generate", "/pause_generation", "/update_weights_from_disk", "/health", "/ready"} <= routes.keys()
    for route, methods in [*routes.items(), *((path, {"get": {}}) for path in ("/metrics", "/docs", "/openapi.json"))]:
        for method in [*methods, "options"]:
            for brought in ({}, {"Authorization": "Bearer wrong"}):
                answer = requests.request(method, server.url + route, json={}, headers=brought, timeout=TIMEOUT_S)
                assert answer.status_code == 401, (method, route, answer.status_code)
    assert not ask(server, lambda client: client.is_paused())


def test_the_key_of_a_server_is_in_its_file_alone(server):
    """Not in any log. For the list of processes see test_server_launch.py."""
    generate(server, PROMPTS, SamplingParams(max_new_tokens=2))
    folder = server.supervisor.key_file.parent.parent
    holders = [path for path in folder.rglob("*") if path.is_file() and server.key.encode() in path.read_bytes()]
    assert holders == [server.supervisor.key_file]
    assert b"server_args=" in (folder / "server-0.log").read_bytes()


def test_a_server_imports_the_models_of_our_families_alone(server):
    """Of the others some cannot be imported on a CPU, which SGLang logs with its module's name."""
    log = (server.supervisor.key_file.parent.parent / "server-0.log").read_text()
    assert "server_args=" in log and "sglang.srt.models." not in log
