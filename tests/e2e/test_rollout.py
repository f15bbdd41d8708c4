"""The controller, its handle and a real SGLang server: batches, held-out answers,
a kill in mid-step."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megatron_dapo.common.rollout_errors import NeedsSync
from megatron_dapo.config.loader import load_config
from megatron_dapo.rollout.handle import RolloutHandle
from megatron_dapo.servers.client import FOREIGN_VERSION, SGLangClient
from megatron_dapo.servers.supervisor import ServerSupervisor
from tests.forked_servers import forked_servers
from tests.tiny_models import EOS_ID

pytestmark = pytest.mark.e2e

MAX_LENGTH, TRAIN, N = 24, 4, 4

REWARD = """
def score(data_source, response, ground_truth, extra_info):
    return float(any(letter in response for letter in "aeiou"))
"""


@pytest.fixture
def handle(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutHandle]:
    """A random model of characters: about every second response has a vowel,
    so groups of both kinds come."""
    rows = [{"prompt": f"{a}+{b}=", "label": "a", "data_source": "vowels"} for a in range(10) for b in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "vowel_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = [
        f"actor_rollout_ref.model.path={server.model_path}",
        f"data.train_files=[{tmp_path}/prompts.jsonl]",
        f"data.val_files=[{tmp_path}/prompts.jsonl]",
        "data.apply_chat_template=false",
        f"data.train_batch_size={TRAIN}",
        f"data.gen_batch_size={TRAIN}",
        "data.max_prompt_length=16",
        f"data.max_response_length={MAX_LENGTH}",
        f"actor_rollout_ref.rollout.n={N}",
        *server.supervisor.overrides(),
        "actor_rollout_ref.rollout.step_timeout_s=400.0",
        "algorithm.dynamic_sampling.enable=true",
        "reward.function=vowel_rewards:score",
        f"trainer.run_dir={tmp_path}/run",
    ]
    handle = RolloutHandle.start(load_config(None, overrides))
    yield handle
    handle.close()


async def weight_version(server) -> int:
    async with SGLangClient(server.url, server.key) as client:
        return await client.weight_version()


async def name_weights(server, version: int) -> None:
    """Stands in for a weight push."""
    async with SGLangClient(server.url, server.key) as client:
        await client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})


async def pause(server) -> None:
    """From now on requests wait, as in a push."""
    async with SGLangClient(server.url, server.key) as client:
        await client.pause()


def freeze_behind(pid: int) -> None:
    """From now on requests wait, and the server does not say so: its HTTP side answers, its
    scheduler is stopped."""
    for child in psutil.Process(pid).children(recursive=True):
        child.suspend()


def supervise(servers: ServerSupervisor, work: Future):
    """The result of the work; dead servers are restarted meanwhile."""
    while not work.done():
        servers.check()
        try:
            work.result(timeout=0.5)
        except TimeoutError:
            pass
    return work.result()


def check_groups(batch, version: int) -> None:
    assert len(batch.groups) == TRAIN
    for group in batch.groups:
        assert 0 < sum(sample.correct for sample in group.samples) < N == len(group.samples)
        for sample in group.samples:
            length = sample.num_response_tokens
            assert 1 <= length <= MAX_LENGTH
            assert len(sample.rollout_log_probs) == len(sample.weight_versions) == len(sample.loss_mask) == length
            assert all(log_prob <= 0 for log_prob in sample.rollout_log_probs)
            assert set(sample.weight_versions) <= {version, version - 1}
            assert sample.is_truncated == (sample.finish_reason == "length") == (EOS_ID not in sample.response_tokens)
            assert sample.correct == any(letter in sample.response_text for letter in "aeiou")


def test_batches_come_from_a_real_server_and_survive_its_death(server, handle):
    url, servers = server.url, server.supervisor
    with ThreadPoolExecutor() as threads:
        handle.wait_ready()
        with pytest.raises(NeedsSync):  # the server has the weights of its start
            handle.next_batch(1, 1)
        asyncio.run(name_weights(server, 1))
        batch = handle.next_batch(1, 1)
        check_groups(batch, version=1)
        assert batch.metrics["rollout/tokens_per_s"] > 0
        assert batch.metrics["response_length/max"] <= MAX_LENGTH

        metrics = handle.evaluate(1, 1)
        assert metrics["val/num_prompts"] == 100
        # as after a push without its last call: the server is told to continue
        asyncio.run(pause(server))
        again = handle.evaluate(1, 1)
        assert again.pop("val/seconds") > 0 and metrics.pop("val/seconds") > 0
        assert metrics == again  # greedy

        (pid,) = servers.pids()
        freeze_behind(pid)
        step = threads.submit(handle.next_batch, 2, 1)
        time.sleep(3)  # the requests are at the server by then
        assert not step.done()
        os.kill(pid, signal.SIGKILL)
        with forked_servers(), pytest.raises(NeedsSync):
            supervise(servers, step)
        assert servers.pids() != [pid] and servers.urls == [url]
        # it holds the checkpoint's weights again, and says so
        assert asyncio.run(weight_version(server)) == FOREIGN_VERSION
        asyncio.run(name_weights(server, 1))
        batch = handle.next_batch(2, 1)
        check_groups(batch, version=1)
        assert batch.metrics["rollout/num_retries"] > 0
