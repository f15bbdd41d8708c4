"""The benchmark beside TRL: CPU time of whole process trees, between the right steps, by part."""

import subprocess
import sys

import psutil
import pytest

from benchmarks import product_floor
from benchmarks.bench_trl import (
    CASES,
    CONTROLLER,
    HTTP,
    REST,
    SAMPLING,
    SCHEDULER,
    TRAINING,
    floor_row,
    our_overrides,
    part_of_ours,
    row_of,
)
from benchmarks.cpu_watch import ProcessTree, Reading, between, watched
from benchmarks.product_floor import Products, Step, floor
from examples.arithmetic.problems import BASE, write_files
from examples.demo_run import config_path, prompt_files
from launch.trainer_ranks import trainer_command
from megatron_dapo.checks.run_checks import load_and_validate

pytestmark = pytest.mark.unit


def test_a_command_that_fails_is_an_error():
    with pytest.raises(Exception, match="exit status 3"):
        watched([sys.executable, "-c", "raise SystemExit(3)"], {}, lambda: 0, lambda command, parent: "main")


def test_a_process_is_named_by_its_own_command_line_and_by_its_parents():
    # it has no children
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        tree = ProcessTree(psutil.Process(process.pid), lambda command, parent: "top" if parent is None else "below")
        assert set(tree.cpu_s()) == {"top"}


def test_steps_are_counted_from_the_end_of_the_first_to_the_end_of_the_last():
    readings = [
        Reading(0, 1.0, {"a": 1.0}),
        Reading(2, 5.0, {"a": 2.0}),  # one look may find two steps done
        Reading(3, 6.0, {"a": 4.0, "b": 1.0}),
        Reading(3, 9.0, {"a": 9.0, "b": 9.0}),  # the end, which is no step
    ]
    assert between(readings, 2, 3) == Reading(1, 1.0, {"a": 2.0, "b": 1.0})
    assert between(readings, 1, 3) == Reading(1, 1.0, {"a": 2.0, "b": 1.0})
    with pytest.raises(ValueError, match="empty"):
        between(readings, 1, 4)


def test_the_parts_of_a_run_are_told_apart():
    rank = part_of_ours(trainer_command("config.yaml", []), REST)
    controller = part_of_ours(["python", "-c", "from multiprocessing.spawn import spawn_main"], rank)
    server = part_of_ours(["python", "-m", "megatron_dapo.servers.keyed_sglang", "KEY"], REST)
    assert part_of_ours(["python", "-m", "examples.arithmetic.demo"], None) == REST
    assert (rank, controller, server) == (TRAINING, CONTROLLER, HTTP)
    assert part_of_ours(["python", "-m", "megatron_dapo.rewards.reward_worker"], controller) == CONTROLLER
    assert part_of_ours(["sglang::scheduler"], server) == SCHEDULER
    assert part_of_ours(["sglang::detokenizer"], server) == HTTP


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_makes_the_demo_equal_to_trls_run_is_a_valid_config(case, tmp_path):
    overrides = our_overrides(case, "examples/arithmetic/base", tmp_path)
    config = load_and_validate(
        str(config_path("demo.yaml")), [*overrides, *prompt_files(*write_files(tmp_path / "prompts"))]
    )
    assert config.trainer.total_training_steps == case.num_steps > case.warm_up
    assert not config.algorithm.dynamic_sampling.enable


def test_seconds_are_per_sample_and_the_whole_is_the_sum_of_its_parts():
    case = CASES[0]
    used = Reading(10, 20.0, {SAMPLING: 12.8, SCHEDULER: 10.0, HTTP: 2.8, TRAINING: 6.4, REST: 1.28})
    row = row_of(case, "ours", used, [{"reward/mean": 0.0}] * 10 + [{"reward/mean": 1.0}] * 5)
    assert row["num_samples"] == 10 * 128 and row["last_reward"] == 1.0
    assert row["cpu_ms_per_sample"][SAMPLING] == pytest.approx(10.0)
    assert row["cpu_ms_per_sample"]["all"] == pytest.approx(16.0)


def test_the_products_are_those_of_the_model_and_each_counts_for_its_rows(monkeypatch):
    """By hand, at one second per row and weight: the demo's four layers and head."""

    def timed(work, rows, weight):
        return len(rows) * weight.numel() * (1 if work.__name__ == "_forward" else 3)

    monkeypatch.setattr(product_floor, "_timed", timed)
    products = Products.of_model(BASE)
    layers = 4 * (256 * 128 + 128 * 128 + 512 * 128 + 128 * 256)
    head = 64 * 128
    assert sum(outputs * inputs for outputs, inputs in products.layers) == layers
    assert floor(products, Step(128, 6, 10, 1024)) == {
        "sampling": 16 * layers + 10 * head,
        "old log-probs": 16 * layers + 10 * head,
        "update": 3 * (16 * layers + 10 * head),
    }


def test_the_row_of_the_products_has_the_columns_of_the_trainers():
    row = floor_row(CASES[0], BASE, response_length=10.0)
    used = row["cpu_ms_per_sample"]
    assert used["all"] == pytest.approx(used[SAMPLING] + used[TRAINING])
    assert 0 < used[SAMPLING] < used[TRAINING]
