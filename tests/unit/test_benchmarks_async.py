"""The benchmark of asynchronous rollouts: its committed figures hold,
its stand-ins do as they say."""

import json
import random
from dataclasses import replace
from itertools import product
from statistics import fmean

import numpy as np
import pytest

from benchmarks import bench_async, simulate_async_recipe
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.plan.simulated_server import Machines, SimulatedRequest, SimulatedServer
from megatron_dapo.commands.plan.simulation import Recipe, Simulation, mean_age, random_draws
from megatron_dapo.commands.plan.step_time import Assumptions, run_time
from megatron_dapo.config.derived import world_size
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.data.samples import Group
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.estimates.server_memory import server_memory
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.queue.step_statistics import RolloutStep
from megatron_dapo.rollout.step_metrics import step_metrics
from tests.helpers import REPOSITORY
from tests.model_json import QWEN2_5_32B

pytestmark = pytest.mark.unit

MAX_DISCARDED = 0.15
FIGURES = {"steps_per_s", "wait_share", "slots_used", "discarded_share", "ratio"}


def committed(name: str = "async_cpu") -> dict:
    return json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text())


def test_sampling_while_the_trainer_trains_is_faster_as_promised_and_as_simulated():
    of_k = {result["max_staleness"]: result for result in committed()["results"]}
    assert list(of_k) == [0, 1, 2]
    assert of_k[1]["measured"]["ratio"] >= 1.3 and of_k[2]["measured"]["ratio"] >= 1.6
    assert of_k[2]["measured"]["wait_share"] <= 0.1 or of_k[2]["measured"]["slots_used"] >= 0.9
    for result in of_k.values():
        assert result["measured"]["ratio"] == pytest.approx(result["predicted"]["ratio"], rel=0.1)


def test_the_demo_learns_what_it_learns_in_step_with_its_trainer():
    results = committed("async_demo_cpu")["results"]
    assert {(result["max_staleness"], result["seed"]) for result in results} == set(product((0, 1, 2, 4), (1, 2, 3)))
    synchronous = {result["seed"]: result["last_reward"] for result in results if result["max_staleness"] == 0}
    rollout = (REPOSITORY / "docs/rollout.md").read_text().splitlines()
    for max_staleness in (0, 1, 2, 4):
        of_k = [result for result in results if result["max_staleness"] == max_staleness]
        assert all(result["num_steps"] == 40 and result["oldest"] <= max_staleness for result in of_k)
        worst = min(result["last_reward"] - synchronous[result["seed"]] for result in of_k)
        assert worst >= -0.05 or max_staleness > 2
        reward, accuracy = fmean(r["last_reward"] for r in of_k), min(r["accuracy"] for r in of_k)
        shown = (
            f"| {max_staleness} | {reward:.3f} | {worst:+.3f} | {accuracy:.3f} | {of_k[0]['seconds_per_step']:.2f} |"
        )
        assert shown in rollout, shown


def test_a_synchronous_step_discards_little_at_any_acceptance():
    shares = committed()["discarded"]
    assert {share["acceptance"] for share in shares} == {0.3, 0.45, 0.6, 0.8}
    assert all(share["discarded_share"] < MAX_DISCARDED for share in shares)
    assert committed()["results"][0]["measured"]["discarded_share"] < MAX_DISCARDED


def test_the_figures_of_the_docs_are_the_committed_ones():
    rollout = (REPOSITORY / "docs/rollout.md").read_text().splitlines()
    for result in committed()["results"]:
        speed, predicted = result["measured"], result["predicted"]
        shown = (
            f"| {result['max_staleness']} | {speed['ratio']:.2f} | {predicted['ratio']:.2f} | "
            f"{speed['wait_share']:.0%} | {speed['slots_used']:.0%} |"
        )
        assert shown in rollout, shown
    sizes: dict[int, list[str]] = {}
    for share in committed()["discarded"]:
        sizes.setdefault(share["train_batch_size"], []).append(f"{share['discarded_share']:.1%}")
    for size, shares in sizes.items():
        assert f"| {size} | {' | '.join(shares)} |" in rollout
    cluster = (REPOSITORY / "docs/cluster.md").read_text().splitlines()
    for result in committed("async_recipe")["results"]:
        shown = (
            f"| {result['acceptance']:g} | {result['train_batch_size']} | {result['max_staleness']} | "
            f"{result['trainer_gpus']}:{128 - result['trainer_gpus']} | {result['seconds_per_512_groups']:.0f} | "
            f"{result['wait_share']:.0%} | {result['slots_used']:.0%} | {result['mean_age']:.0f} |"
        )
        assert shown in cluster, shown


def test_the_page_and_the_plan_say_the_same_of_the_async_recipe():
    """Both have the plan's speeds; the plan simulates fewer requests, and for fewer steps."""
    config = settled(load_config(recipe("dapo_32b_async")), simulate_async_recipe.SPEC)
    (of_config,) = [
        result
        for result in committed("async_recipe")["results"]
        if result["acceptance"] == 0.45
        and result["train_batch_size"] == config.data.train_batch_size
        and result["max_staleness"] == config.actor_rollout_ref.rollout.max_staleness
        and result["trainer_gpus"] == world_size(config)
    ]
    run = run_time(
        config,
        simulate_async_recipe.SPEC,
        Assumptions.usual(config, HARDWARE["h100"]),
        [config.actor_rollout_ref.rollout.max_staleness],
    )
    (step,) = run.steps
    assert of_config["mfu"] == pytest.approx(run.parts.training.mfu)
    assert of_config["seconds_per_512_groups"] * config.data.train_batch_size / 512 == pytest.approx(
        step.step, rel=0.05
    )
    assert of_config["wait_share"] == pytest.approx(step.trainer_idle, abs=0.05)
    assert of_config["slots_used"] == pytest.approx(1 - step.servers_idle, abs=0.1)


@pytest.mark.parametrize("number", range(11))
def test_a_run_would_accept_every_split_of_the_table(number):
    """The trainer's GPUs are whole copies of the model, which share a mini-batch evenly."""
    case = simulate_async_recipe.cases(is_quick=False)[number]
    validate(case.config, model_json_named("qwen2.5-32b"), check_files=False)


def test_the_simulated_age_does_not_depend_on_how_long_the_run_had_gone_on():
    """The halves of the measurement differ by less than the shown precision,
    a whole optimizer step."""
    for result in committed("async_recipe")["results"]:
        first, second = result["mean_age_of_halves"]
        assert abs(first - second) < 1, result
        assert result["mean_age"] <= result["max_staleness"] * result["train_batch_size"] / 32


def test_the_simulated_servers_take_what_the_recipe_lets_them_take_and_their_caches_hold(tmp_path):
    """A running response is half written on the average,
    and long ones run for longer: E[L^2] / 2 E[L] tokens."""
    assert committed("async_recipe")["slots_per_server"] == simulate_async_recipe.ROLLOUT.max_concurrency == 288
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_32B))
    cache = server_memory(simulate_async_recipe.CONFIG, read_model_spec(str(tmp_path)))
    source = random.Random(0)
    lengths = [simulate_async_recipe.LENGTHS.sample(source) for _ in range(100_000)]
    num_tokens = sum(length * length for length in lengths) / (2 * sum(lengths))
    assert 288 * num_tokens < cache.num_tokens


def test_an_answer_has_as_many_tokens_of_each_version_as_were_written_between_the_pushes():
    """Two responses of 10 and 30 tokens of 0.1 s; pushes after 1.5 and 2.5 s."""
    server = SimulatedServer(Machines(1, 2, token_s=0.1, train_s=0.0, push_s=0.0))
    for number, length in enumerate((10, 30)):
        server.add(SimulatedRequest(number, "a", length, is_correct=True))
    server.advance(1.0)
    assert server.pop()[1] == {0: 10}
    for seconds in (0.5, 1.0):
        server.advance(seconds)
        server.push()
    server.advance(server.seconds_to_next_end())
    request, num_tokens = server.pop()
    assert (request.number, num_tokens, list(num_tokens)) == (1, {0: 15, 1: 10, 2: 5}, [0, 1, 2])
    server.add(SimulatedRequest(2, "a", 4, is_correct=True))
    server.advance(0.4)
    assert server.pop()[1] == {2: 4}


def test_the_simulated_age_is_the_runs_metric_token_by_token():
    draws = random_draws(Lengths(median=30, sigma=0.9, longest=200), acceptance=0.5, n=2, seed=1)
    machines = Machines(num_servers=2, slots_per_server=8, token_s=0.01, train_s=0.5, push_s=0.1)
    simulation = Simulation(machines, Recipe(4, 12, n=2, max_staleness=2, num_steps=3, warm_up=3), draws)
    simulation.run()
    groups = simulation.trained[-4:]  # of the sixth step, which begins with version 5
    metrics = step_metrics(RolloutStep(6, groups=tuple(map(token_by_token, groups))), 5, num_retries=0, seconds=1.0)
    assert mean_age(groups, weight_version=5) == pytest.approx(metrics["rollout/staleness_mean"])
    assert metrics["rollout/version_span_max"] > 0


def token_by_token(group: Group) -> Group:
    """Return a simulated group with an entry per token in place of one per version."""
    samples = []
    for sample in group.samples:
        versions = np.repeat(sample.weight_versions, sample.loss_mask).tolist()
        samples.append(replace(sample, weight_versions=tuple(versions), loss_mask=(1,) * len(versions)))
    return replace(group, samples=tuple(samples))


def test_the_benchmark_runs_and_its_report_has_what_the_docs_show(tmp_path):
    bench_async.main(["--quick", "--staleness", "0,1", "--json", str(tmp_path / "async.json")])
    report = json.loads((tmp_path / "async.json").read_text())
    assert [result["max_staleness"] for result in report["results"]] == [0, 1]
    for result in report["results"]:
        assert result["measured"].keys() & result["predicted"].keys() == FIGURES
        assert 0 < result["measured"]["slots_used"] <= 1 and 0 < result["measured"]["wait_share"] < 1
