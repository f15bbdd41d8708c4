"""A random harness over HTTP: each written token is in one row or in a named number, and each turn
of a row is a prompt that the servers got."""

import asyncio
import random
from collections import Counter
from contextlib import suppress

import httpx
import pytest

from megatron_dapo.agents.interface import Outcome
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.config.schema.agent import AgentConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.samples import Group, Prompt
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.rollout.agent_play import AgentPlay, Agents
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import SamplingParams
from tests.agent_gateway import NAME, bench, plain_http
from tests.proofs import amount
from tests.scripted_agents import Rewards, Servers, pool_of

pytestmark = pytest.mark.unit

NUM_TRAJECTORIES, NUM_ROUNDS, AT_ONCE = amount(6, 60), 5, 3
END_ID, WORDS = 257, 60  # tokens that begin lines of ASCII in the tests' tokenizer of bytes


def appended(draw, known):
    return [*draw.choice(known), {"role": "user", "content": draw.choice("abc")}]


def edited(draw, known):
    messages = [dict(message) for message in draw.choice(known)]
    draw.choice(messages)["content"] += "!"
    return [*messages, {"role": "user", "content": draw.choice("abc")}]


async def harness(task, model):
    draw = random.Random(task.number)
    known = [list(task.messages)]

    async def ask(http):
        messages = draw.choice([appended, appended, edited])(draw, known)
        kind = draw.choice(["plain", "plain", "choices", "twin", "retried", "left", "cut"])
        body = {"model": NAME, "messages": messages, "n": 1 + (kind == "choices"), "max_tokens": draw.randint(1, 12)}

        async def send(retries=0, **more):
            headers = {"Authorization": f"Bearer {model.key}", "x-stainless-retry-count": str(retries)}
            return await http.post(f"{model.base_url}/chat/completions", json=body, headers=headers, **more)

        if kind == "left":  # its client is gone, and may come again
            with suppress(httpx.TimeoutException):
                await send(timeout=0.01)
            if draw.random() < 0.5:
                return
            answers = [await send(1)]
        elif kind == "cut":
            body["stream"] = True
            headers = {"Authorization": f"Bearer {model.key}"}
            async with http.stream("POST", f"{model.base_url}/chat/completions", json=body, headers=headers):
                return
        else:
            counts = {"twin": (0, 0), "retried": (0, 1)}.get(kind, (0,))
            answers = await asyncio.gather(*(send(count) for count in counts))
        for answer in answers:
            assert answer.status_code == 200, answer.text
            for choice in answer.json()["choices"]:
                known.append([*messages, {"role": "assistant", "content": choice["message"]["content"] or ""}])

    async with plain_http() as http:
        for _ in range(NUM_ROUNDS):
            await asyncio.gather(*(ask(http) for _ in range(AT_ONCE)))
    return Outcome(reward=1.0)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The group, the metrics, the servers' prompts, and the number of tokens that came from them."""
    draw, written = random.Random(7), Counter()

    async def answer(tokens, params):
        await asyncio.sleep(draw.choice([0.0, 0.03, 0.1]))
        length = draw.randint(1, params.max_new_tokens)
        answer = [draw.randrange(WORDS, WORDS + 20) for _ in range(length)]
        if length < params.max_new_tokens:
            answer[-1] = END_ID
        return tuple(answer)

    class Counted(Servers):
        async def generate(self, *args):
            try:
                generation = await super().generate(*args)
            except asyncio.CancelledError:
                args[-1].num_given_up = draw.randint(0, 5)
                written["given_up"] += 1
                written["tokens"] += args[-1].num_given_up
                raise
            written["tokens"] += len(generation.tokens)
            return generation

    async def play(running, servers, agents):
        tokenizer = load_tokenizer(running.folder)
        data = DataConfig(max_prompt_length=400)
        sampler = Sampler(
            servers, Rewards(), tokenizer, RolloutConfig(), 258, play=AgentPlay(agents, servers, tokenizer, data).play
        )
        prompt = Prompt(0, "hi", (5,), "hi", "", "")
        params = SamplingParams(600, temperature=0.5)
        return await sampler.sample_group(Group("g", prompt, version=1), NUM_TRAJECTORIES, params)

    folder = tmp_path_factory.mktemp("random") / "model"
    with bench(folder, retry_wait_s=0.02) as running:
        servers = Counted(answer)
        keys = AgentConfig(enable=True, max_branches=64)
        agents = Agents(keys, running.gateways, pool_of(harness)())
        group = running.runner.run(play(running, servers, agents))
        return group, agents.metrics.take(), [tuple(tokens) for tokens, _ in servers.asked], written


def test_no_trajectory_failed_and_all_that_can_happen_did(played):
    group, metrics, _, written = played
    assert written["given_up"] > 0
    assert [sample.reward_error for sample in group.samples] == [None] * NUM_TRAJECTORIES
    for name in ("num_retries", "num_tokens_undelivered", "num_tokens_twins"):
        assert metrics[f"agent/{name}"] > 0, name
    assert metrics["agent/num_refused"] == metrics["agent/num_tokens_lost"] == metrics["agent/num_restarts"] == 0
    assert all(len(sample.branches) > 3 for sample in group.samples)


def test_each_written_token_is_in_one_row_or_in_a_named_number(played):
    group, metrics, _, written = played
    counted = sum(int(branch.loss_mask.sum()) for sample in group.samples for branch in sample.branches)
    left_out = sum(metrics[f"agent/num_tokens_{name}"] for name in ("undelivered", "twins", "lost"))
    assert counted + left_out == written["tokens"] and counted > written["tokens"] / 2


def test_each_turn_of_a_row_is_a_prompt_that_a_server_got(played):
    group, _, asked, _ = played
    asked = set(asked)
    num_turns = 0
    for branch in (branch for sample in group.samples for branch in sample.branches):
        tokens = [*branch.prompt_tokens.tolist(), *branch.response_tokens.tolist()]
        own = [False] * len(branch.prompt_tokens) + (branch.rollout_log_probs != 0).tolist()
        for place in range(1, len(own)):
            if own[place] and not own[place - 1]:
                assert tuple(tokens[:place]) in asked
                num_turns += 1
    assert num_turns > 10 * NUM_TRAJECTORIES
