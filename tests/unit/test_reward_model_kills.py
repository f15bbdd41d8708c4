"""A reward model with a server killed again and again: each response is scored, and none twice."""

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter

import pytest

from megatron_dapo.rollout import reward_model_client as reward_model
from megatron_dapo.servers import supervisor
from megatron_dapo.servers.run_servers import RunServers
from tests import fake_server
from tests.fake_rollout import WORDS, make_config, rollout_folder, run_with_controller, until
from tests.proofs import amount

pytestmark = pytest.mark.unit

NUM_KILLS = amount(6, 20)
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With prompts, and a reward model on a stand-in server; its own supervisor starts it again."""
    for made in rollout_folder(tmp_path, monkeypatch):
        model = made / "reward_model"
        model.mkdir()
        (model / "tokenizer.json").write_text((made / "tokenizer.json").read_text())
        (model / "chat_template.jinja").write_text(TEMPLATE)
        config = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1, "vocab_size": len(WORDS)}
        (model / "config.json").write_text(json.dumps(config))

        def command(config, host, port, gpus, behaviour=f"classifies {made}/answered"):
            words = (sys.executable, fake_server.__file__, host, str(port), behaviour)
            return supervisor.ServerCommand(words, dict(os.environ))

        monkeypatch.setattr(supervisor, "sglang_command", command)
        monkeypatch.setattr(reward_model, "_PAUSE_S", 0.02)
        yield made


async def alive(servers: RunServers) -> None:
    """Look after the servers, as launch/ does."""
    while True:
        await asyncio.to_thread(servers.check)
        await asyncio.sleep(0.02)


def test_a_server_killed_again_and_again_in_mid_step_costs_no_sample_and_scores_none_twice(folder):
    keys = [
        f"reward.model.path={folder}/reward_model",
        f"actor_rollout_ref.rollout.server.max_restarts={NUM_KILLS}",
        f"trainer.run_dir={folder}/run",
    ]
    servers = RunServers(make_config(folder, [], *keys), folder, rollout=False, reward_model=True)
    chance = random.Random(5)

    async def scenario(controller, _):
        batches = []
        for step in range(NUM_KILLS):
            [pid] = servers.pids()
            sampling = asyncio.create_task(controller.next_batch(step + 1, 1))
            await asyncio.sleep(chance.uniform(0.0, 2 * fake_server.CLASSIFY_S))
            os.kill(pid, signal.SIGKILL)
            batches.append(await sampling)
            await until(lambda killed=pid: servers.pids() not in ([], [killed]))
        return batches

    async def beside_servers(controller, others):
        looking = asyncio.create_task(alive(servers))
        try:
            return await scenario(controller, others)
        finally:
            looking.cancel()

    servers.start()
    try:
        while not servers.check():
            pass
        batches = run_with_controller(
            beside_servers, lambda others: make_config(folder, others, *keys, *servers.overrides()), 1
        )
    finally:
        servers.stop()
    samples = [(group.prompt, sample) for batch in batches for group in batch.groups for sample in group.samples]
    assert len({sample.uid for _, sample in samples}) * 2 == len(samples) == NUM_KILLS * 8
    assert sum(batch.metrics["reward/num_crashes"] + batch.metrics["reward/num_exceptions"] for batch in batches) == 0
    assert all(0 < batch.metrics["reward/wait_share"] <= 1 for batch in batches)
    for prompt, sample in samples:
        own = 1000.0 * WORDS.index(prompt.text) + sample.response_tokens[0]
        assert sample.raw_reward == own + sample.correct and sample.reward_error is None
    answered = Counter((folder / "answered").read_text().splitlines())
    assert max(answered.values()) == 1, "a response that had its score was asked about again"
