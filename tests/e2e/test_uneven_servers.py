"""Two real servers, one of them with an eighth of the other's CPU: its factor is measured, and its
answers go on at the other one."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.samples import Group, Prompt
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import SamplingParams, SGLangClient
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import read_server_key
from tests.fake_rollout import until
from tests.forked_servers import forked_servers
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

FACTOR = 8.0  # far above SEEN: on a loaded machine both servers wait for others
SEEN = 2.0  # a factor that no noise gives
NUM_REQUESTS, LENGTH = 24, 400
LOOK_S = 3.0


class AllRight:
    scores_groups = False

    async def score(self, *_):
        return RewardResult(1.0, True)


class Numbers:
    def decode(self, tokens):
        return " ".join(map(str, tokens))


def cpu_s(process: psutil.Process) -> float:
    """Return the seconds of CPU of all its threads, to the nanosecond."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat")) / 1e9


@contextmanager
def slowed(slow: psutil.Process, usual: psutil.Process) -> Iterator[None]:
    """Stop a process whenever it had more than 1 / FACTOR of the other one's CPU: on a machine with
    any other load its steps then take FACTOR times as long."""
    is_over = threading.Event()

    def work() -> None:
        before = cpu_s(slow), cpu_s(usual)
        stopped_at: float | None = None
        while not is_over.wait(0.005):
            is_ahead = FACTOR * (cpu_s(slow) - before[0]) > cpu_s(usual) - before[1]
            # now and then it goes on: the other one may have nothing to do
            if stopped_at is not None and (not is_ahead or time.monotonic() - stopped_at > 1.5):
                slow.send_signal(signal.SIGCONT)
                stopped_at = None
            elif stopped_at is None and is_ahead:
                slow.send_signal(signal.SIGSTOP)
                stopped_at = time.monotonic()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        slow.send_signal(signal.SIGCONT)


def test_a_slow_servers_answers_go_on_at_the_other_with_the_log_probs_of_the_model(tmp_path):
    path = make_tiny(tmp_path / "model", "qwen2")
    keys = [f"actor_rollout_ref.model.path={path}", f"trainer.run_dir={tmp_path / 'run'}"]
    server = "actor_rollout_ref.rollout.server"
    options = [f"{server}.num_servers=2", f"{server}.extra_args=[--load-snapshot-publish-interval,'1']"]
    config = load_config(None, [*keys, *options])
    servers = ServerSupervisor(config, tmp_path)
    with forked_servers():
        servers.start()
    try:
        servers.wait_healthy()
        groups = asyncio.run(sampled(servers))
    finally:
        servers.stop()
    answers = [one for group in groups for one in group.samples]
    moved = [one for one in answers if len(one.servers) == 2]
    assert moved
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    for one in moved:
        tokens = [*one.prompt_tokens.tolist(), *one.response_tokens.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, len(one.prompt_tokens) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(one.response_tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(one.rollout_log_probs), wanted, atol=1e-4, rtol=0)


async def sampled(servers: ServerSupervisor) -> list[Group]:
    """All groups, after the slow server was seen and lost some requests."""
    key = read_server_key(servers.key_file)
    slow, usual = (
        next(process for process in psutil.Process(pid).children() if "scheduler" in process.name())
        for pid in servers.pids()
    )
    connect = partial(SGLangClient, api_key=key)
    pool = ServerPool(ServerList(urls=servers.urls), 128, 60.0, 0.3, connect=connect, look_s=LOOK_S)
    try:
        await pool.start(60.0)
        version = await pool.servers[0].client.weight_version()
        await pool.expect(version)
        keys = RolloutConfig(request_timeout_s=120.0, max_retries=2)
        sampler = Sampler(pool, AllRight(), Numbers(), keys, 64)
        numbers, groups, is_over = count(), [], asyncio.Event()

        async def keep_busy() -> None:
            while not is_over.is_set():
                number = next(numbers)
                prompt = Prompt(number, "p", (4 + number % 50, 9, 5), "p", "fake", "")
                group = Group(f"{number:08d}", prompt, version=version)
                groups.append(await sampler.sample_group(group, 1, SamplingParams(LENGTH)))

        with slowed(slow, usual):
            at_work = [asyncio.create_task(keep_busy()) for _ in range(NUM_REQUESTS)]
            await until(lambda: pool.servers[0].factor > SEEN, 240)
            pool.is_blocked = lambda: True
            await until(lambda: sampler.counts["moves"] >= 2, 240)
        is_over.set()
        await asyncio.gather(*at_work)
        return groups
    finally:
        await pool.close()
