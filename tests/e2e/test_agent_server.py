"""A random harness at a real server: the trainer's forward of every row gives the server's
log-probs."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_dapo.agents.interface import Outcome
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.samples import Branch, Group, Prompt, Sample
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.rollout.agent_play import AgentPlay
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import FOREIGN_VERSION, SamplingParams, SGLangClient
from megatron_dapo.servers.growing_answer import GrowingAnswer
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.policy import Policy
from tests.scripted_agents import agents_of
from tests.tiny_models import EOS_ID

pytestmark = pytest.mark.e2e

NUM_TRAJECTORIES, NUM_REQUESTS = 6, 8
MAX_PROMPT, MAX_RESPONSE = 16, 90
STOP = ("a", "b", "cd", "e")


async def harness(task, model):
    """Appends, goes back, begins anew, asks for two choices, with and without stop texts; several
    requests at once."""
    draw = random.Random(task.number)
    answers = []

    async def ask():
        parent = draw.choice([None, *answers[-3:]])
        suffix = [draw.randrange(5, 60) for _ in range(draw.randint(1, 6))]
        options = {"n": draw.choice([1, 1, 2]), "stop": draw.choice([(), STOP]), "room": draw.randint(2, 12)}
        return await model.ask(suffix, None if parent is None else parent.node, **options), options["stop"]

    for _ in range(NUM_REQUESTS // 2):
        for written, stop in await asyncio.gather(ask(), ask()):
            answers += written
            task.extra_info["written"] += [(answer, stop) for answer in written]
    return Outcome(reward=float(task.number % 2))


@pytest.fixture(scope="module")
def played(server) -> tuple[list[Sample], list]:
    async def play():
        pool = ServerPool(
            ServerList(urls=[server.url]), 64, 60.0, 1.0, connect=lambda url: SGLangClient(url, server.key)
        )
        tokenizer = load_tokenizer(server.model_path)
        agents = agents_of(harness)
        data = DataConfig(max_prompt_length=MAX_PROMPT, max_response_length=MAX_RESPONSE)
        player = AgentPlay(agents, pool, tokenizer, data)
        sampler = Sampler(pool, SimpleNamespace(scores_groups=False), tokenizer, RolloutConfig(), 64, play=player.play)
        written: list = []
        prompt = Prompt(0, "", (5, 6), "", "", "", {"written": written})
        try:
            await pool.start(60.0)
            await pool.expect(FOREIGN_VERSION)
            group = Group("g", prompt, version=FOREIGN_VERSION)
            group = await sampler.sample_group(group, NUM_TRAJECTORIES, SamplingParams(MAX_RESPONSE))
            return list(group.samples), written
        finally:
            await pool.close()

    return asyncio.run(play())


def row(number: int, branch: Branch) -> Group:
    """A branch alone, with all its written tokens counted."""
    uid = f"g{number}"
    prompt = Prompt(number, "", tuple(branch.prompt_tokens.tolist()), "", "", "")
    arrays = {name: getattr(branch, name) for name in Branch.ARRAYS}
    arrays["loss_mask"] = (branch.rollout_log_probs != 0).astype(np.uint8)
    arrays["weight_versions"] = np.zeros_like(branch.weight_versions)
    sample = Sample(
        **arrays, uid=uid, finish_reason="stop", raw_reward=1.0, correct=True, reward=float(number), is_truncated=False
    )
    return Group(uid, prompt, (sample,))


def test_every_row_has_the_trainers_log_probs(server, played, tmp_path):
    """Float32 on both sides. They add up in another order: 5e-4 is the bound of the program's own
    runs (test_program.py); tokens of another prefix differ by whole units."""
    samples, written = played
    branches = [branch for sample in samples for branch in sample.branches]
    num_written = sum(len(answer.tokens) for answer, _ in written)
    assert sum(sample.num_written_tokens for sample in samples) <= num_written
    assert sum(int(branch.loss_mask.sum()) for branch in branches) == num_written
    assert len(branches) > 3 * NUM_TRAJECTORIES
    shared = sum(int((branch.rollout_log_probs != 0).sum()) for branch in branches) - num_written
    assert shared > 50  # read again, and not counted again
    layout = ParallelLayout.initialize()
    try:
        config = load_config(
            None,
            [
                f"actor_rollout_ref.model.path={server.model_path}",
                f"trainer.run_dir={tmp_path}/run",
                f"data.train_batch_size={len(branches)}",
                "actor_rollout_ref.actor.ppo_mini_batch_size=1",  # else there is nothing to score
                "actor_rollout_ref.rollout.n=1",
            ],
        )
        policy = Policy(config, layout)
        distribute = StepDistributor(config, layout, policy.model.spec, policy.model.routed_layers)
        shard = distribute(1, [row(number, branch) for number, branch in enumerate(branches)])
        differences = [
            (batch.old_log_probs - batch.rollout_log_probs).abs()[batch.loss_mask != 0]
            for mini in policy.score(shard.mini_batches)
            for batch in mini
        ]
    finally:
        ParallelLayout.shutdown()
    assert len(torch.cat(differences)) == num_written + shared
    assert torch.cat(differences).max() < 5e-4


def test_stop_texts_end_answers_and_stay_in_their_tokens(server, played):
    tokenizer = load_tokenizer(server.model_path)
    num_stopped = 0
    for answer, stop in played[1]:
        # "<pad>" has an "a"
        text = tokenizer.decode(answer.tokens, skip_special_tokens=False)
        before = tokenizer.decode(answer.tokens[:-1], skip_special_tokens=False)
        assert not any(each in before for each in stop) and len(answer.tokens) == len(answer.log_probs)
        has_stop = any(each in text for each in stop)
        num_stopped += has_stop
        assert (answer.finish_reason == "stop") == (has_stop or answer.tokens[-1] == EOS_ID)
    assert num_stopped > 3


def test_requests_that_nobody_waits_for_end_and_tell_their_tokens(server):
    async def give_up():
        async with SGLangClient(server.url, server.key) as client:
            at_server, answers = Server(client), [GrowingAnswer() for _ in range(16)]
            params = [SamplingParams(400, sampling_seed=seed) for seed in range(16)]
            asking = [
                asyncio.create_task(at_server.generate((5, 6), each, 60.0, FOREIGN_VERSION, answer=answer))
                for each, answer in zip(params, answers, strict=True)
            ]
            while not (await client.load()).requests_used:
                await asyncio.sleep(0.01)
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            return [answer.num_given_up for answer, task in zip(answers, asking, strict=True) if task.cancelled()]

    counts = asyncio.run(give_up())
    assert sum(count > 0 for count in counts) > 4 and max(counts) < 400


def test_a_harness_that_asks_the_same_gets_other_answers(played):
    samples, _ = played
    rows = [tuple(branch.response_tokens.tolist()) for sample in samples for branch in sample.branches]
    assert len(set(rows)) == len(rows)
    assert all(sample.num_turns >= NUM_REQUESTS for sample in samples)
