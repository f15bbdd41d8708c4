"""Two real servers, one of them stopped three quarters of the time: its factor is measured, and
its answers go on at the other one."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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

PERIOD_S, STOPPED_S = 0.1, 0.075
NUM_GROUPS, N, LENGTH = 16, 4, 400
LOOK_S = 2.0


class AllRight:
    scores_groups = False

    async def score(self, *_):
        return RewardResult(1.0, True)


class Numbers:
    def decode(self, tokens):
        return " ".join(map(str, tokens))


class Duty:
    """Seconds of a process, all and running ones."""

    all_s = running_s = 0.0

    @property
    def factor(self) -> float:
        return self.all_s / self.running_s


@contextmanager
def stopped_in_turns(process: psutil.Process) -> Iterator[Duty]:
    """Stop the process for a while, again and again."""
    is_over, duty = threading.Event(), Duty()

    def work() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            process.send_signal(signal.SIGCONT)
            went_on = time.monotonic()
            time.sleep(PERIOD_S - STOPPED_S)
            now = time.monotonic()
            duty.all_s += now - began
            duty.running_s += now - went_on

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield duty
    finally:
        is_over.set()
        thread.join()
        process.send_signal(signal.SIGCONT)


def test_a_stopped_servers_answers_go_on_at_the_other_with_the_log_probs_of_the_model(tmp_path):
    path = make_tiny(tmp_path / "model", "qwen2")
    keys = [f"actor_rollout_ref.model.path={path}", f"trainer.run_dir={tmp_path / 'run'}"]
    config = load_config(None, [*keys, "actor_rollout_ref.rollout.server.num_servers=2"])
    servers = ServerSupervisor(config, tmp_path)
    with forked_servers():
        servers.start()
    try:
        servers.wait_healthy()
        groups, factor, expected = asyncio.run(sampled(servers))
    finally:
        servers.stop()
    assert 0.6 * expected < factor < 1.6 * expected, (factor, expected)
    answers = [one for group in groups for one in group.samples]
    moved = [one for one in answers if len(one.servers) == 2]
    assert len(answers) == NUM_GROUPS * N and moved
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    for one in moved:
        tokens = [*one.prompt_tokens.tolist(), *one.response_tokens.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, len(one.prompt_tokens) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(one.response_tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(one.rollout_log_probs), wanted, atol=1e-4, rtol=0)


async def sampled(servers: ServerSupervisor) -> tuple[list[Group], float, float]:
    """All groups, the factor of the stopped server, and the expected one."""
    key = read_server_key(servers.key_file)
    children = psutil.Process(servers.pids()[0]).children()
    scheduler = next(process for process in children if "scheduler" in process.name())
    connect = partial(SGLangClient, api_key=key)
    pool = ServerPool(ServerList(urls=servers.urls), 128, 60.0, 0.3, connect=connect, look_s=LOOK_S)
    try:
        await pool.start(60.0)
        version = await pool.servers[0].client.weight_version()
        await pool.expect(version)
        keys = RolloutConfig(request_timeout_s=120.0, max_retries=2)
        sampler = Sampler(pool, AllRight(), Numbers(), keys, 64)
        groups = [
            Group(f"{number:08d}", Prompt(number, "p", (4 + number, 9, 5), "p", "fake", ""), version=version)
            for number in range(NUM_GROUPS)
        ]
        with stopped_in_turns(scheduler) as duty:
            running = asyncio.gather(*(sampler.sample_group(group, N, SamplingParams(LENGTH)) for group in groups))
            await until(lambda: all(server.speedometer.factor for server in pool.servers) or running.done())
            factor = pool.servers[0].factor
            expected = duty.factor
            pool.is_blocked = lambda: True
            await until(lambda: sampler.counts["moves"] >= 2 or running.done())
        return await asyncio.wait_for(running, 120), factor, expected
    finally:
        await pool.close()
