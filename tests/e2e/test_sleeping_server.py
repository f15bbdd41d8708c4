"""A real SGLang server with --enable-memory-saver gives its memory back, and wakes without its
weights. Asleep in the middle of a request, with weights pushed again, it ends the request as if it
had never slept."""

import asyncio
import base64
import io
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.config.loader import load_config
from megatron_dapo.platform.cpu_ledger import CpuLedger
from megatron_dapo.platform.sglang_cpu import cpu_server
from megatron_dapo.servers.client import Generation, SGLangClient, generation_of
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import read_server_key
from tests.forked_servers import forked_servers
from tests.keeping_plug_in import write_keeping_plug_in
from tests.proofs import few
from tests.tiny_models import make_tiny

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the adaptation is of CPU servers"),
]

Answer = TypeVar("Answer")
WEIGHTS, CACHE, ALL = "weights", "kv_cache", ["kv_cache", "weights", "cuda_graph"]
PROMPT, LENGTH = [8, 9], 400
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Sleeper:
    """A server; its ledgers, one per rank; its checkpoint."""

    url: str
    key: str
    ledgers: list[CpuLedger]
    model: Path

    def ask(self, question: Callable[[SGLangClient], Awaitable[Answer]]) -> Answer:
        async def run() -> Answer:
            async with SGLangClient(self.url, self.key) as client:
                return await question(client)

        return asyncio.run(run())

    def held(self) -> list[int]:
        return [ledger.held()["server"] for ledger in self.ledgers]

    async def wait_until(self, holds: Callable[[int], bool]) -> None:
        """Return when it holds of every rank's bytes: rank 0 answers before the others are done."""
        deadline = time.monotonic() + TIMEOUT_S
        while not all(map(holds, self.held())):
            assert time.monotonic() < deadline, f"the ledgers say {self.held()} bytes"
            await asyncio.sleep(0.02)


def start(folder: Path, num_ranks: int, family: str = "mistral") -> Iterator[Sleeper]:
    model = make_tiny(folder / "model", family, layers=2)
    server = "actor_rollout_ref.rollout.server"
    config = load_config(
        None,
        [
            f"actor_rollout_ref.model.path={model}",
            f"trainer.run_dir={folder}/run",
            f"{server}.startup_timeout_s=200.0",
            f"{server}.tensor_model_parallel_size={num_ranks}",
            f"{server}.extra_args=[--enable-memory-saver]",
        ],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_DAPO_LEDGER", str(folder / "ledger"))
        patch.setenv("MEGATRON_DAPO_LEDGER_GPUS", "2,3")
        supervisor = ServerSupervisor(config, folder)
        with forked_servers():
            supervisor.start()
    try:
        supervisor.wait_healthy()
        ledgers = [CpuLedger(folder / "ledger" / f"gpu{2 + rank}.jsonl", None) for rank in range(num_ranks)]
        yield Sleeper(supervisor.urls[0], read_server_key(supervisor.key_file), ledgers, model)
    finally:
        supervisor.stop()


SLEEPERS = {"tp2": (2,), "states": (1, "qwen3_5"), "tp1": (1,)}  # the second has states of requests, too


@pytest.fixture(scope="module", params=few(list(SLEEPERS), 2))
def sleeper(request, tmp_path_factory) -> Iterator[Sleeper]:
    yield from start(tmp_path_factory.mktemp("sleeper"), *SLEEPERS[request.param])


async def generate(client: SGLangClient) -> Generation:
    sampling = {"max_new_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    fields = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    return generation_of(await client.post("/generate", fields, TIMEOUT_S))


async def generate_anew(client: SGLangClient) -> Generation:
    """The same with an empty cache."""
    await client.post("/flush_cache", {})
    return await generate(client)


async def running(client: SGLangClient) -> asyncio.Task[Generation]:
    """A request, in the middle of it; the server is paused."""
    for _ in range(50):  # its scheduler tells of itself now and then, perhaps not in time
        await client.post("/flush_cache", {})
        request = asyncio.create_task(generate(client))
        while not request.done() and not (await client.load()).kv_used:
            await asyncio.sleep(0.01)
        await client.pause("retract")
        if not request.done():
            return request
        await client.continue_()
    raise AssertionError("every request was over before anyone looked")


async def release(client: SGLangClient, *tags: str) -> None:
    await client.post("/release_memory_occupation", {"tags": list(tags)})


async def resume(client: SGLangClient, *tags: str) -> None:
    await client.post("/resume_memory_occupation", {"tags": list(tags)})


async def push(client: SGLangClient, tensors: dict[str, torch.Tensor], num_ranks: int) -> None:
    """Send weights by handles of shared memory, one string per rank."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        sent = [serialized(tensors) for _ in range(num_ranks)]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    await client.begin_weight_update()
    await client.post("/update_weights_from_tensor", {"serialized_named_tensors": sent, "weight_version": "1"})
    await client.end_weight_update()


def serialized(tensors: dict[str, torch.Tensor]) -> str:
    file = io.BytesIO()
    ForkingPickler(file).dump(list(tensors.items()))
    return base64.b64encode(file.getvalue()).decode()


def test_a_request_under_way_ends_as_on_a_server_that_never_slept(sleeper):
    tensors = load_file(sleeper.model / "model.safetensors")
    awake = sleeper.held()

    async def sleep_in_the_middle(client: SGLangClient) -> Generation:
        request = await running(client)
        await release(client, *ALL)
        await sleeper.wait_until(lambda held: held == 0)
        await resume(client, WEIGHTS)
        assert all(0 < part < whole for part, whole in zip(sleeper.held(), awake, strict=True))
        await push(client, tensors, len(sleeper.ledgers))
        await resume(client, CACHE, "cuda_graph")
        await client.continue_()
        return await request

    expected = sleeper.ask(generate_anew)
    got = sleeper.ask(sleep_in_the_middle)
    assert sleeper.held() == pytest.approx(awake, rel=0.05)  # a table of the start was replaced since
    assert got.num_retractions == 1 and len(got.tokens) == LENGTH
    assert 0 < list(got.weight_versions).count(1) < LENGTH
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.log_probs.tolist() == pytest.approx(expected.log_probs.tolist(), abs=1e-5)


@pytest.mark.parametrize("sleeper", ["states"], indirect=True)
def test_states_of_requests_sleep_with_the_cache(sleeper):
    """Of the delta net in one of two layers; the other has keys and values."""
    keys_and_values = cpu_server.MAX_TOTAL_TOKENS * 2 * (2 * 16)  # 2 heads of 16 dimensions
    num_states = cpu_server.STATES_PER_REQUEST * cpu_server.MAX_RUNNING_REQUESTS
    recurrent, convolution = 8 * 16 * 8, (2 * 4 * 8 + 8 * 16) * 3
    cache = 4 * (keys_and_values + num_states * (recurrent + convolution))

    async def sleep(client: SGLangClient) -> int:
        (awake,) = sleeper.held()
        await client.pause("retract")
        await release(client, CACHE)
        await sleeper.wait_until(lambda held: held < awake)
        (asleep,) = sleeper.held()
        await resume(client, CACHE)
        await client.continue_()
        return awake - asleep

    assert cache <= sleeper.ask(sleep) < 1.1 * cache  # with a table of places


def test_every_weight_is_garbage_after_waking_and_exactly_itself_after_a_push(sleeper):
    """SGLang's checksums see all of them. They keep storages from being resized: so this comes
    last."""
    tensors = load_file(sleeper.model / "model.safetensors")

    async def sleep(client: SGLangClient) -> list[tuple[dict[str, str], ...]]:
        checksums = [await client.checksums()]
        await client.pause("retract")
        await release(client, *ALL)
        await sleeper.wait_until(lambda held: held == 0)
        await resume(client, WEIGHTS)
        checksums.append(await client.checksums())
        await push(client, tensors, len(sleeper.ledgers))
        checksums.append(await client.checksums())
        await resume(client, CACHE, "cuda_graph")
        await client.continue_()
        return checksums

    before, awoken, pushed = sleeper.ask(sleep)
    assert len(before) == len(sleeper.ledgers) and before == pushed
    for rank_before, rank_awoken in zip(before, awoken, strict=True):
        kept = [name for name, checksum in rank_before.items() if rank_awoken[name] == checksum]
        # SGLang restores what is no parameter
        assert all(name.endswith((".gemma_weight", ".axis_map")) for name in kept)
    assert sleeper.ask(generate).tokens.tolist() == sleeper.ask(generate_anew).tokens.tolist()


def test_a_server_that_answers_and_keeps_its_memory_is_seen_in_the_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(write_keeping_plug_in(tmp_path / "plug_in")))
    for sleeper in start(tmp_path, 1):
        awake = sleeper.held()

        async def sleep(client: SGLangClient) -> None:
            await client.pause("retract")
            await release(client, *ALL)

        sleeper.ask(sleep)
        assert awake[0] > 0 and sleeper.held() == awake
