"""The server's own work in the plan of a CPU: a server's measured time, and its reading."""

import json

import pytest

from benchmarks.bench_plan import hardware_of
from benchmarks.server_seconds import fitted
from megatron_dapo.checks.hardware import hardware_named
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

FILES = REPOSITORY / "benchmarks" / "results"


def test_what_a_token_and_a_request_take_is_read_from_batches_of_both():
    """3 ms a token of all, 0.1 ms for each request's, 2 ms for a request."""
    rows = [
        {"num_requests": r, "length": length, "seconds": (3e-3 + 1e-4 * r) * length + 2e-3 * r}
        for r in (4, 16, 64)
        for length in (5, 20)
    ]
    fit = fitted(rows)
    assert fit["token_s"] == pytest.approx(3e-3) and fit["request_token_s"] == pytest.approx(1e-4)
    assert fit["request_s"] == pytest.approx(2e-3) and fit["largest_error"] < 1e-9


def test_the_plan_takes_what_was_measured():
    fit = json.loads((FILES / "plan_cpu.json").read_text())["server"]["fit"]
    hardware = hardware_named("cpu")
    assert hardware.host_token_s == pytest.approx(fit["token_s"], rel=0.02)
    assert hardware.host_request_token_s == pytest.approx(fit["request_token_s"], rel=0.02)
    assert hardware.host_request_s == pytest.approx(fit["request_s"], rel=0.02)
    assert fit["largest_error"] < 0.25


def test_a_run_of_the_benchmark_plans_with_what_it_measured_itself():
    hardware = hardware_of({"token_s": 1.0, "request_token_s": 2.0, "request_s": 3.0, "largest_error": 0.1})
    assert (hardware.host_token_s, hardware.host_request_token_s, hardware.host_request_s) == (1.0, 2.0, 3.0)
    assert hardware.flops == hardware_named("cpu").flops


def test_the_demo_is_planned_within_a_fifth_by_its_own_speeds_in_all_sizes():
    for row in json.loads((FILES / "plan_cpu.json").read_text())["results"]:
        assert abs(row["ratio_by_itself"] - 1) <= 0.2, row["run"]
