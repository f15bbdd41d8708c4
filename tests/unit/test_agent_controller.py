"""Steps of agents with a whole controller: admission, metrics, pushes, stops, failures, accounts."""

import asyncio
from collections import Counter

import pytest

from megatron_dapo.agents.interface import Outcome
from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.commands.evaluation.answer_file import AnswerFile
from megatron_dapo.commands.evaluation.answering import answer
from megatron_dapo.common.errors import UserError
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.rollout.build_rollout import load_prompts
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import (
    WORDS,
    FakeServer,
    Script,
    WritingServer,
    make_config,
    mislabelled,
    needs_sync,
    prompt_numbers,
    run_with_controller,
    until,
)
from tests.scripted_agents import controllers_agents

pytestmark = pytest.mark.unit

AGENT = "actor_rollout_ref.rollout.agent"
ON = [f"{AGENT}.enable=true", f"{AGENT}.function=scripted:rollout", f"{AGENT}.end_timeout_s=1.0"]
ON += [f"{AGENT}.tool_parser=qwen25", f"{AGENT}.reasoning_parser=qwen3"]  # the folder's model is of no family
SAME = Script(default=("right",))


def first_tokens(task):
    return [WORDS.index(task.prompt)]


async def mixed(task, model):
    """Two turns in one branch, and for even numbers a second branch; half of a group is right."""
    (first,) = await model.ask(first_tokens(task))
    await model.ask([WORDS.index("p7")], first.node)
    if task.number % 2 == 0:
        await model.ask([*first_tokens(task), WORDS.index("p9")])
    return Outcome(reward=float(task.number % 2), metrics={"cost": 2.0 * (task.number % 2)})


def run(folder, monkeypatch, agent, scenario, *overrides, script=SAME, num_servers=1):
    with controllers_agents(monkeypatch, agent) as made:
        return run_with_controller(
            lambda controller, servers: scenario(controller, servers, made),
            lambda servers: make_config(folder, servers, *ON, *overrides),
            num_servers,
            script,
        )


def account(controller):
    account = controller._drawing.queue.account
    assert account.is_closed, account
    return account


def samples(batch):
    return [sample for group in batch.groups for sample in group.samples]


def test_a_step_of_agents_metric_by_metric(folder, monkeypatch):
    async def scenario(controller, servers, made):
        batch = await controller.next_batch(1, 1)
        assert made.gateways[0].num_open == 0 and controller._servers.in_flight() == {}
        return batch

    batch = run(folder, monkeypatch, mixed, scenario, num_servers=2)
    assert prompt_numbers(batch) == [0, 1, 2, 3] and len(samples(batch)) == 8
    for sample in samples(batch):
        assert [len(branch.response_tokens) for branch in sample.branches] == ([5, 2] if sample.number == 0 else [5])
        assert (sample.num_turns, sample.correct) == (3 - sample.number, sample.number == 1)
        assert {*sample.weight_versions} == {1}
    expected = {
        "rollout/num_turns_mean": 2.5, "reward/accuracy": 0.5, "agent/cost": 1.0, "agent/num_tokens_undelivered": 0,
        "agent/num_tokens_twins": 0, "agent/num_restarts": 0, "agent/num_tokens_lost": 0, "rollout/num_env_failures": 0,
        "rollout/staleness_max": 0,
    }  # fmt: skip
    assert {name: batch.metrics[name] for name in expected} == expected


def test_dynamic_sampling_judges_the_agents_verdicts(folder, monkeypatch):
    async def agent(task, model):
        await model.ask(first_tokens(task))
        is_uniform = task.prompt in ("p1", "p2")
        return Outcome(reward=0.0 if is_uniform else float(task.number))

    async def scenario(controller, servers, made):
        batch = await controller.next_batch(1, 1)
        assert account(controller).num_open == 0
        return batch

    batch = run(folder, monkeypatch, agent, scenario)
    assert prompt_numbers(batch)[:2] == [0, 3] and batch.metrics["dapo/filtered_all_incorrect"] == 2


def test_the_baseline_of_a_group_is_one_more_greedy_trajectory(folder, monkeypatch):
    async def agent(task, model):
        (answer,) = await model.ask(first_tokens(task))
        return Outcome(reward=0.75 if task.number == 2 else float(task.number))

    async def scenario(controller, servers, made):
        batch = await controller.next_batch(1, 1)
        temperatures = Counter(request["sampling_params"]["temperature"] for request in servers[0].requests)
        return batch, temperatures, [task.number for task in made.pools[0].tasks]

    batch, temperatures, numbers = run(folder, monkeypatch, agent, scenario, "algorithm.adv_estimator=remax")
    assert [group.baseline_reward for group in batch.groups] == [0.75] * 4
    assert temperatures == {1.0: 8, 0.0: 4} and Counter(numbers) == {0: 4, 1: 4, 2: 4}


def test_validation_plays_the_same_agent_with_its_own_sampling(folder, monkeypatch):
    async def scenario(controller, servers, made):
        metrics = await controller.evaluate(1, 1)
        assert all(task.is_validation for task in made.pools[0].tasks)
        assert {request["sampling_params"]["temperature"] for request in servers[0].requests} == {0.25}
        await controller.next_batch(1, 1)
        return metrics, (await controller.next_batch(2, 1)).metrics

    rollout = "actor_rollout_ref.rollout"
    validated = [f"data.val_files=[{folder}/val.jsonl]", f"{rollout}.val_n=2", f"{rollout}.val_temperature=0.25"]
    metrics, _ = run(folder, monkeypatch, mixed, scenario, *validated)
    assert metrics["val/accuracy"] == 0.5 and metrics["val/num_env_failures"] == 0 and metrics["val/num_prompts"] == 3


def test_an_evaluation_plays_agents_too(folder, monkeypatch):
    async def main():
        server = await FakeServer(Script(default=("right",))).start()
        try:
            rollout = "actor_rollout_ref.rollout"
            config = make_config(folder, [server], *ON, f"{rollout}.val_n=2", f"{rollout}.val_temperature=0.25")
            tokenizer = load_tokenizer(folder)
            prompts = load_prompts([f"{folder}/val.jsonl"], config, tokenizer)
            answers = AnswerFile(folder / "answers.jsonl")
            await answer(config, prompts, tokenizer, answers, None, lambda version: None, lambda: None)
            return answers.records
        finally:
            await server.stop()

    with controllers_agents(monkeypatch, mixed) as made:
        records = asyncio.run(main())
    assert all(task.is_validation for task in made.pools[0].tasks)
    assert sorted((record["prompt"], record["correct"], record["num_turns"]) for record in records) == [
        (f"p{number}", is_right, 2 + (not is_right)) for number in range(3) for is_right in (False, True)
    ]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_no_more_agents_are_open_than_their_places(folder, monkeypatch, max_staleness):
    """With K > 0 a prompt is drawn for a free place only, though slots are free for many."""
    release = asyncio.Event()

    async def agent(task, model):
        await model.ask(first_tokens(task))
        await release.wait()  # a tool
        return Outcome(reward=float(task.number))

    async def scenario(controller, servers, made):
        servers[0].version = 1
        step = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: bool(made.gateways) and made.gateways[0].num_open == 4)
        await asyncio.sleep(0.1)
        assert made.gateways[0].num_open == 4 and controller._servers.in_flight() == {}
        assert account(controller).num_open == (2 if max_staleness else 4)
        release.set()
        batch = await step
        assert made.gateways[0].most_open == 4
        account(controller)
        return batch

    correction = ["algorithm.rollout_correction.rollout_is=token"] if max_staleness else []
    keys = [f"{AGENT}.max_open=4", f"actor_rollout_ref.rollout.max_staleness={max_staleness}", *correction]
    assert prompt_numbers(run(folder, monkeypatch, agent, scenario, *keys)) == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["close", "halt"])
def test_places_that_become_free_at_the_end_start_no_further_agents(folder, monkeypatch, how):
    async def agent(task, model):
        await model.ask(first_tokens(task))
        if task.prompt not in ("p0", "p1", "p2", "p3"):  # ahead of the trainer
            await asyncio.sleep(600)
        return Outcome(reward=float(task.number))

    async def scenario(controller, servers, made):
        await controller.next_batch(1, 1)
        gateways, pool = made.gateways[0], made.pools[0]
        await until(lambda: gateways.num_open == 4 and pool.num_ended == 8)
        monkeypatch.setattr("megatron_dapo.rollout.filling._ABORT_S", 0.05)
        await (controller.halt() if how == "halt" else controller._filling.cancel())
        await asyncio.sleep(0.05)
        assert gateways.num_open == 0 and len(pool.tasks) == pool.num_ended == 12
        account(controller)

    keys = [f"{AGENT}.max_open=4", "actor_rollout_ref.rollout.max_staleness=2"]
    run(folder, monkeypatch, agent, scenario, *keys, "algorithm.rollout_correction.rollout_is=token")


def test_a_failed_agent_leaves_a_complete_group(folder, monkeypatch):
    async def agent(task, model):
        (answer,) = await model.ask(first_tokens(task))
        if (task.prompt, task.number) == ("p2", 1):
            raise ValueError("scripted")
        return Outcome(reward=float(task.number))

    async def scenario(controller, servers, made):
        batch = await controller.next_batch(1, 1)
        account(controller)
        return batch

    batch = run(folder, monkeypatch, agent, scenario, "algorithm.dynamic_sampling.enable=false")
    errors = [sample.reward_error for sample in samples(batch)]
    assert errors == [None] * 5 + ["agent: exception: ValueError: scripted"] + [None] * 2
    assert batch.metrics["rollout/num_env_failures"] == 1 and batch.metrics["agent/num_restarts"] == 1


def test_agents_that_all_fail_end_the_run_with_their_key(folder, monkeypatch):
    async def agent(task, model):
        raise ValueError("scripted")

    async def scenario(controller, servers, made):
        with pytest.raises(UserError) as error:
            await controller.next_batch(1, 1)
        account(controller)
        return str(error.value)

    message = run(folder, monkeypatch, agent, scenario)
    assert (
        "8 of 8 responses got no verdict (agent 8)" in message and "correct actor_rollout_ref.rollout.agent" in message
    )
    assert "ValueError: scripted" in message


def test_a_stop_keeps_finished_trajectories_and_the_others_begin_anew(folder, monkeypatch):
    release = asyncio.Event()
    ends = []

    async def agent(task, model):
        await model.ask(first_tokens(task))
        if task.number == 1:
            try:
                await release.wait()
            finally:
                ends.append(task.prompt)
        return Outcome(reward=float(task.number))

    async def stopped(controller, servers, made):
        step = asyncio.create_task(controller.next_batch(1, 1))
        pool = made.pools[0]
        await until(lambda: pool.num_ended == 4 and len(pool.tasks) == 8)
        monkeypatch.setattr("megatron_dapo.rollout.filling._ABORT_S", 0.05)
        step.cancel()
        await asyncio.wait({step})
        assert len(ends) == 4 and made.gateways[0].num_open == 0
        account(controller)
        return to_bytes(controller.state_dict())

    async def resumed(controller, servers, made):
        controller.load_state_dict(from_bytes(state))
        batch = await controller.next_batch(1, 1)
        account(controller)
        return batch, made.pools[0].tasks

    state = run(folder, monkeypatch, agent, stopped)
    release.set()
    batch, tasks = run(folder, monkeypatch, agent, resumed)
    assert [(task.prompt, task.number) for task in tasks] == [(f"p{number}", 1) for number in range(4)]
    assert [sample.raw_reward for sample in samples(batch)] == [0.0, 1.0] * 4


def test_a_stop_keeps_the_finished_trajectories_ahead_of_the_trainer_with_all_branches(folder, monkeypatch):
    async def agent(task, model):
        await model.ask(first_tokens(task))
        await model.ask([*first_tokens(task), WORDS.index("p9")])
        if task.number == 1 and task.prompt not in finished:
            await asyncio.sleep(600)
        return Outcome(reward=float(task.number))

    async def stopped(controller, servers, made):
        await controller.next_batch(1, 1)
        pool = made.pools[0]
        await until(lambda: pool.num_ended == 8 + 12 and len(pool.tasks) == 32)
        monkeypatch.setattr("megatron_dapo.rollout.filling._ABORT_S", 0.05)
        await controller.halt()
        assert made.gateways[0].num_open == 0 and pool.num_ended == 32
        account(controller)
        return to_bytes(controller.state_dict())

    async def resumed(controller, servers, made):
        controller.load_state_dict(from_bytes(state))
        batch = await controller.next_batch(2, 1)
        account(controller)
        return batch, [(task.prompt, task.number) for task in made.pools[0].tasks]

    keys = [f"{AGENT}.max_open=24", "actor_rollout_ref.rollout.max_staleness=2"]
    keys += ["algorithm.rollout_correction.rollout_is=token"]
    finished = {f"p{number}" for number in range(4)}
    state = run(folder, monkeypatch, agent, stopped, *keys)
    finished |= {f"p{number}" for number in range(40)}
    batch, tasks = run(folder, monkeypatch, agent, resumed, *keys)
    assert prompt_numbers(batch) == [4, 5, 6, 7] and tasks[:12] == [(f"p{number}", 1) for number in range(4, 16)]
    for sample in samples(batch):
        assert [len(branch.response_tokens) for branch in sample.branches] == [2, 2] and sample.num_turns == 2


def test_servers_without_the_weights_cost_the_unfinished_trajectories_only(folder, monkeypatch):
    gate = asyncio.Event()

    async def agent(task, model):
        (first,) = await model.ask(first_tokens(task))
        if task.number == 1:
            await gate.wait()
            await model.ask([WORDS.index("p7")], first.node)
        return Outcome(reward=float(task.number))

    async def scenario(controller, servers, made):
        step = asyncio.create_task(needs_sync(controller.next_batch(1, 1)))
        pool = made.pools[0]
        await until(lambda: pool.num_ended == 4 and len(pool.tasks) == 8)
        servers[0].version = 0  # as its answers tell
        gate.set()
        assert await step and made.gateways[0].num_open == 0
        account(controller)
        servers[0].version = 1  # pushed
        batch = await controller.next_batch(1, 1)
        return batch, [task.number for task in pool.tasks[8:]]

    batch, again = run(folder, monkeypatch, agent, scenario)
    assert batch.metrics["agent/num_tokens_lost"] == 4 * 2 and batch.metrics["agent/num_restarts"] == 0
    assert again == [1] * 4 and [sample.num_turns for sample in samples(batch)] == [1, 2] * 4


def test_a_push_within_a_turn_labels_each_token_and_none_is_older_than_the_draw(folder, monkeypatch):
    async def main():
        server = await WritingServer(lambda: 6, token_s=0.02, version=1).start()
        keys = ["actor_rollout_ref.rollout.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"]
        controller = Controller(make_config(folder, [server], *ON, *keys, "data.max_response_length=40"))
        try:
            await controller.start()
            step = asyncio.create_task(controller.next_batch(2, 1))
            await server.until_written(8, 2)
            await server.push(2)
            return await asyncio.wait_for(step, 60)
        finally:
            await controller.close()
            await server.stop()

    async def agent(task, model):
        (first,) = await model.ask(first_tokens(task), room=6)
        await model.ask([WORDS.index("p7")], first.node, room=6)
        return Outcome(reward=float(task.number))

    with controllers_agents(monkeypatch, agent):
        batch = asyncio.run(main())
    for group in batch.groups:
        for sample in group.samples:
            written = sample.loss_mask == 1
            pairs = zip(sample.weight_versions[written], sample.rollout_log_probs[written], strict=True)
            assert all(version >= group.version == 1 for version, _ in pairs)
    first = batch.groups[0].samples[0]
    assert {*first.weight_versions[:6]} == {1, 2} and {*first.weight_versions[7:]} == {2}
    assert first.weight_versions[6] == first.weight_versions[5]
    assert [pair for pair in mislabelled(first) if pair[1] != 0.0] == []


def test_servers_that_fail_end_the_step_and_all_agents(folder, monkeypatch):
    async def scenario(controller, servers, made):
        servers[0].failures = [500] * 1000
        with pytest.raises(Exception, match="failed 2 times"):
            await controller.next_batch(1, 1)
        assert made.gateways[0].num_open == 0 and made.pools[0].num_ended == len(made.pools[0].tasks)
        account(controller)

    run(folder, monkeypatch, mixed, scenario, "actor_rollout_ref.rollout.max_retries=1")


def test_parsers_ask_any_server_there(folder, monkeypatch):
    from aiohttp import web

    async def parse(self, request):
        fields = await request.json()
        return web.json_response({"got": fields}, status=400 if fields.get("bad") else 200)

    routes = FakeServer.routes
    monkeypatch.setattr(
        FakeServer, "routes", lambda self: [*routes(self), web.post("/separate_reasoning", self._parse)]
    )
    monkeypatch.setattr(FakeServer, "_parse", parse, raising=False)
    seen = []

    async def agent(task, model):
        await model.ask(first_tokens(task))
        for fields in ({"text": "a"}, {"bad": True}):
            try:
                seen.append(await model.session.parse("/separate_reasoning", fields))
            except ValueError as error:
                seen.append("HTTP 400" in str(error))
        return Outcome(reward=float(task.number))

    async def scenario(controller, servers, made):
        await servers[0].stop()
        with_one = asyncio.create_task(controller.next_batch(1, 1))
        await with_one

    run(folder, monkeypatch, agent, scenario, num_servers=2)
    assert seen.count({"got": {"text": "a"}}) == seen.count(True) == 8
