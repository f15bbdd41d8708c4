"""Agents with gateways and workers of their own, under scripted servers: a killed process costs a
restart of its trajectories, and no account stays open."""

import asyncio
import os
import signal

import psutil
import pytest

from tests.fake_rollout import (
    Script,
    make_config,
    prompt_numbers,
    rollout_folder,
    run_with_controller,
    until,
)

pytestmark = pytest.mark.distributed

AGENT = "actor_rollout_ref.rollout.agent"
FUNCTION = """
import asyncio, os
from pathlib import Path
from megatron_dapo.agents.interface import Outcome

async def rollout(task, model, folder, turns=2):
    Path(folder, f"{task.prompt}-{task.number}.pid").write_text(str(os.getpid()))
    ids = [6 + int(task.prompt[1:])]
    for _ in range(turns):
        answer = await model.generate(ids, max_tokens=2)
        ids = [*ids, *answer.tokens, 13]
        while Path(folder, "wait").exists():
            await asyncio.sleep(0.02)
    return Outcome(reward=float(task.number), metrics={"turns": turns})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for folder in rollout_folder(tmp_path, monkeypatch):
        (folder / "real_agent.py").write_text(FUNCTION)
        yield folder


def run(folder, scenario, *overrides):
    keys = [
        f"{AGENT}.enable=true",
        f"{AGENT}.function=real_agent:rollout",
        f"{AGENT}.kwargs.folder={folder}",
        f"{AGENT}.num_workers=2",
        f"{AGENT}.tool_parser=qwen25",
        f"{AGENT}.reasoning_parser=qwen3",
        "data.max_response_length=20",
    ]
    return run_with_controller(
        scenario, lambda servers: make_config(folder, servers, *keys, *overrides), 1, Script(default=("right",))
    )


def check(batch):
    assert prompt_numbers(batch) == [0, 1, 2, 3]
    for group in batch.groups:
        assert [sample.raw_reward for sample in group.samples] == [0.0, 1.0]
        for sample in group.samples:
            start = sample.prompt_tokens.tolist()
            assert start == [6 + group.prompt.index] and sample.num_turns == 2 and sample.others == ()
            assert sample.response_tokens.tolist() == [2, 0, 13, 2, 0] and sample.loss_mask.tolist() == [1, 1, 0, 1, 1]
            assert sample.reward_error is None and sample.finish_reason == "stop"


def children(word):
    """Processes of this test's with the word in their command."""
    return [each for each in psutil.Process().children(recursive=True) if word in " ".join(each.cmdline())]


def test_a_step_with_all_processes(folder):
    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert controller._drawing.queue.account.is_closed
        return batch

    batch = run(folder, scenario)
    check(batch)
    assert batch.metrics["agent/turns"] == 2.0 and batch.metrics["agent/num_restarts"] == 0
    assert not children("megatron_dapo.agents")


@pytest.mark.parametrize("module", ["gateway_process", "agent_worker"])
def test_a_killed_process_costs_a_restart(folder, module):
    async def scenario(controller, servers):
        (folder / "wait").touch()
        step = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: len(servers[0].requests) == 8)
        (victim, *_) = children(f"agents.{module}")
        os.kill(victim.pid, signal.SIGKILL)
        (folder / "wait").unlink()
        batch = await step
        assert controller._drawing.queue.account.is_closed
        return batch, len(servers[0].requests)

    batch, num_requests = run(folder, scenario)
    check(batch)
    assert 1 <= batch.metrics["agent/num_restarts"] <= 8
    assert batch.metrics["agent/num_tokens_lost"] == 2 * (num_requests - 8 * 2)  # of two tokens each


def test_agents_end_at_their_time_and_with_the_controller(folder):
    async def scenario(controller, servers):
        (folder / "wait").touch()
        batch = await controller.next_batch(1, 1)
        assert controller._drawing.queue.account.is_closed
        return batch

    keys = [f"{AGENT}.timeout_s=1.0", f"{AGENT}.end_timeout_s=0.5", "algorithm.dynamic_sampling.enable=false"]
    batch = run(folder, scenario, *keys)
    for group in batch.groups:
        assert [sample.finish_reason for sample in group.samples] == ["time"] * 2
        assert [sample.raw_reward for sample in group.samples] == [1.0] * 2  # of the text, by reward.function
    assert not children("megatron_dapo.agents")
