"""Validation of a run: its metrics and records, with exact weights,
and that it holds up nothing."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron_dapo.common.rollout_errors import NeedsSync
from megatron_dapo.job import Job
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.telemetry import NullTelemetry
from tests.fake_rollout import RIGHT, Script, WritingServer, make_config, run_in_folder, until

pytestmark = pytest.mark.unit

VAL_N = "actor_rollout_ref.rollout.val_n"
CORRECTED = "algorithm.rollout_correction.rollout_is=token"


def val_file(folder, *sources):
    rows = [{"prompt": f"p{number}", "label": "right", "data_source": name} for number, name in enumerate(sources)]
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.val_files=[{path}]"


def kept(folder, step):
    return [
        json.loads(line) for line in (folder / "run/validation" / f"step_{step:06d}.jsonl").read_text().splitlines()
    ]


def test_each_data_source_has_its_figures_and_every_answer_is_kept(folder):
    """p0 is right in one of four answers, p1 in three, p2 always; the answers are the words."""
    words = {0: ("right", "wrong", "wrong", "wrong_long"), 1: ("right", "right", "wrong", "right"), 2: RIGHT}

    async def scenario(controller, servers):
        return await controller.evaluate(3, 1)

    overrides = [val_file(folder, "aime", "aime", "amc"), f"{VAL_N}=4", "actor_rollout_ref.rollout.val_temperature=1.0"]
    metrics = run_in_folder(folder, scenario, Script(words), overrides=overrides)
    assert metrics.pop("val/seconds") > 0
    # the vote: p0 wrong (two of four; wrong_long is another word), p1 and p2 right
    assert metrics == pytest.approx({
        "val/accuracy": 2 / 3, "val/pass@4": 1, "val/maj@4": 2 / 3, "val/reward_mean": 2 / 3,
        "val/response_length_mean": (11 * 2 + 8) / 12, "val/truncation_ratio": 1 / 12,
        "val/aime/accuracy": 0.5, "val/aime/pass@4": 1, "val/aime/maj@4": 0.5, "val/aime/reward_mean": 0.5,
        "val/aime/response_length_mean": (3 * 2 + 8 + 4 * 2) / 8, "val/aime/truncation_ratio": 1 / 8,
        "val/amc/accuracy": 1, "val/amc/pass@4": 1, "val/amc/maj@4": 1, "val/amc/reward_mean": 1,
        "val/amc/response_length_mean": 2, "val/amc/truncation_ratio": 0,
        "val/num_turns_mean": 1, "val/num_env_failures": 0, "val/num_prompts": 3,
    })  # fmt: skip
    records = kept(folder, 3)
    assert [(record["prompt"], record["number"]) for record in records] == [
        (f"p{prompt}", number) for prompt in range(3) for number in range(4)
    ]
    fields = "step data_source prompt ground_truth text answer raw_reward correct finish_reason num_tokens"
    first = records[0]
    assert sorted(record["text"] for record in records[:4]) == [
        "right",
        "wrong",
        "wrong",
        "wrong_long " * 7 + "wrong_long",
    ]
    assert set(fields.split()) <= set(first) and (first["step"], first["data_source"]) == (3, "aime")
    assert {tuple(record["weight_versions"]) for record in records} == {(1,)}


def test_training_is_sampled_while_held_out_prompts_are_answered(folder):
    """Even without a bound on the age: neither waits for the other, and each gets its request."""

    async def scenario(controller, servers):
        servers[0].hold.clear()
        await controller.begin_evaluation(0, 1)
        batch = asyncio.create_task(controller.next_batch(1, 1))
        await until(lambda: servers[0].num_open == 3 + 8)
        servers[0].hold.set()
        assert len((await batch).groups) == 4
        metrics = await controller.evaluate(0, 1)
        assert metrics["val/num_prompts"] == 3 and len(servers[0].requests) == 3 + 8

    overrides = [val_file(folder, "a", "a", "a"), "algorithm.dynamic_sampling.enable=false"]
    run_in_folder(folder, scenario, overrides=overrides)


def test_weights_that_are_lost_are_waited_for_and_no_answer_is_asked_for_twice(folder):
    async def scenario(controller, servers):
        await controller.begin_evaluation(0, 1)
        validation = controller._validation
        await until(lambda: len(validation._records) == 2)
        servers[0].version = 0  # it was started again
        servers[0].hold.set()
        with pytest.raises(NeedsSync):  # who waits can push
            await controller.evaluate(0, 1)
        servers[0].version = 1
        assert (await controller.evaluate(0, 1))["val/num_prompts"] == 3
        answered = [fields["input_ids"][0] for fields in servers[0].requests]
        assert sorted(answered.count(token) for token in set(answered)) == [1, 1, 2], "one was answered by version 0"

        await controller.begin_evaluation(1, 5)
        await asyncio.sleep(0.3)
        servers[0].version = 5  # a push that a step asked for
        assert (await controller.evaluate(1, 5))["val/num_prompts"] == 3
        assert {version for record in kept(folder, 1) for version in record["weight_versions"]} == {5}

    script = Script()
    # from the end: the last answer is under way when the weights are lost
    script.delays = [0.5, 0.0, 0.0]
    run_in_folder(folder, scenario, script, overrides=[val_file(folder, "a", "a", "a")])


def test_an_evaluation_of_kept_answers_costs_no_more_than_its_own_requests(folder):
    """At K = 1, with a validation of 12 answers under way in every step. The steps ask for the same
    as without it, none waits for its answers, and nothing is asked for twice."""

    def num_requests(validates):
        async def main():
            servers = [await WritingServer(lambda: 6, 0.005, version=0).start() for _ in range(2)]
            overrides = [
                val_file(folder, *["a"] * 6), f"{VAL_N}=2", "actor_rollout_ref.rollout.val_temperature=1.0",
                "actor_rollout_ref.rollout.max_staleness=1", CORRECTED, "algorithm.dynamic_sampling.enable=false",
                "trainer.total_training_steps=7",
            ]  # fmt: skip
            controller = Controller(make_config(folder, servers, *overrides))
            await controller.start()
            try:
                for step in range(1, 8):
                    batch = await controller.next_batch(step, step - 1)
                    assert len(batch.groups) == 4 and batch.metrics["rollout/num_retries"] == 0
                    if validates and step > 1:
                        # in the update: nobody waits for it
                        await until(lambda: controller._validation._task.done())
                        assert (await controller.evaluate(step - 1, step - 1))["val/num_prompts"] == 6
                    await asyncio.gather(*(server.push(step) for server in servers))
                    if validates:
                        await controller.begin_evaluation(step, step)
                if validates:
                    await controller.evaluate(7, 7)
                return sum(len(server.requests) for server in servers)
            finally:
                await controller.close()
                for server in servers:
                    await server.stop()

        return asyncio.run(main())

    assert num_requests(True) == num_requests(False) + 7 * 12
    for step in range(1, 8):
        records = kept(folder, step)
        assert len(records) == 12 and {version for each in records for version in each["weight_versions"]} == {step}


@pytest.mark.parametrize("has_trained_on", [False, True])
def test_weights_that_the_trainer_no_longer_has_are_pushed_to_nobody(has_trained_on, capsys):
    """It is given up: a push would send the next weights under the old version."""
    pushed, reported = [], []

    def evaluate(step, weight_version):
        if not pushed:
            raise NeedsSync("a server came back")
        return {"val/accuracy": 1.0}

    telemetry = NullTelemetry()
    telemetry.log_validation = lambda step, metrics, in_step: reported.append((step, in_step))
    job = SimpleNamespace(
        _rollout=SimpleNamespace(evaluate=evaluate), telemetry=telemetry,
        layout=SimpleNamespace(agreement=SingleRank()),
        placement=SimpleNamespace(
            to_trainer=lambda: None, push=lambda version: pushed.append(version) or SimpleNamespace(num_rejoins=0)
        ),
        _validated_step=4, _updated_step=5 if has_trained_on else 4, _num_optimizer_steps=1, _num_rejoins=0,
    )  # fmt: skip
    job._saved_if_lost = lambda step, num_steps: nullcontext()
    job._ask_rollout = lambda version, question: Job._ask_rollout(job, version, question)
    Job.finish_validation(job)
    assert (pushed, reported) == (([], []) if has_trained_on else ([4], [(4, False)]))
    assert ("after step 4 is given up: a server came back" in capsys.readouterr().out) == has_trained_on
    Job.finish_validation(job)
    assert len(reported) < 2


def test_a_resumed_run_evaluates_again_what_was_answered_but_not_reported(tmp_path):
    """The answers are written when the last one is there, their figures a step later;
    a kill may come between."""
    run = RunFolder(tmp_path)
    job = SimpleNamespace(run=run, layout=SimpleNamespace(agreement=SingleRank()))
    run.validation(4).parent.mkdir()
    run.validation(4).write_text("{}\n")
    assert not Job.has_validated(job, 4)
    run.metrics.write_text('{"step": 4, "actor/loss": 1.0}\n{"step": 2, "val/accuracy": 0.5}\n')
    assert not Job.has_validated(job, 4) and Job.has_validated(job, 2)
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "val/accuracy": 0.5}\n')
    assert Job.has_validated(job, 4)
