"""The benchmark of the schedule: its committed figures keep the promises,
and are those of the docs."""

import json
import math

import pytest

from benchmarks import bench_packing
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def committed() -> dict:
    return json.loads((REPOSITORY / "benchmarks/results/packing_cpu.json").read_text())


def seconds_of(report: dict) -> dict[bench_packing.Case, float]:
    return {
        bench_packing.Case(result["num_samples"], result["dp_size"], result["packed"]): result["seconds"]
        for result in report["results"]
    }


def test_a_large_mini_batch_is_scheduled_in_less_than_a_second():
    seconds = seconds_of(committed())
    assert list(seconds) == bench_packing.TIMED
    assert all(taken < 1 for case, taken in seconds.items() if case.num_samples <= 8192)
    for case in bench_packing.TIMED:  # quadratic would be three times n log n, and more
        if case.num_samples == 32768:
            growth = 4 * math.log(32768) / math.log(8192)
            assert seconds[case] < 2 * growth * seconds[case._replace(num_samples=8192)], case


def test_micro_batches_are_nearly_as_full_as_they_can_be_and_the_work_is_even():
    """At most one micro-batch per rank more than the fewest possible,
    or two in a thousand of many."""
    report = committed()
    fills = report["fills"]
    assert [bench_packing.Case(f["num_samples"], f["dp_size"]) for f in fills] == bench_packing.FILLED
    for f in fills:
        tokens_per_round = f["dp_size"] * report["max_tokens"]
        assert f["fewest"] * tokens_per_round >= f["num_tokens"] > (f["fewest"] - 1) * tokens_per_round
        assert f["num_microbatches"] - f["fewest"] <= max(1, 0.002 * f["fewest"])
        assert f["fill"] == pytest.approx(f["best_fill"] * f["fewest"] / f["num_microbatches"])
        assert f["ranks_max_over_mean"] < 1.01


def test_the_figures_of_the_docs_are_the_committed_ones():
    report = committed()
    lines = (REPOSITORY / "docs/packing.md").read_text().splitlines()
    for f in report["fills"]:
        shown = (
            f"| {f['num_samples']} | {f['dp_size']} | {f['num_microbatches']} | {f['fill']:.1%} | "
            f"{f['best_fill']:.1%} | {f['ranks_max_over_mean']:.4f} | {f['microbatches_max_over_mean']:.2f} |"
        )
        assert shown in lines, shown
    seconds = seconds_of(report)
    for num_samples in dict.fromkeys(case.num_samples for case in seconds):
        figures = [f"{taken:.3f}" for case, taken in seconds.items() if case.num_samples == num_samples]
        start = f"| {num_samples} | {' | '.join(figures)} |"
        assert any(line.startswith(start) for line in lines), start


def test_a_quick_benchmark_reports_every_figure(tmp_path, capsys):
    bench_packing.main(["--quick", "--json", str(tmp_path / "packing.json")])
    report = json.loads((tmp_path / "packing.json").read_text())
    assert report.keys() == committed().keys()
    assert list(seconds_of(report)) == bench_packing.QUICK_TIMED
    (fill,) = report["fills"]
    assert fill.keys() == committed()["fills"][0].keys()
    assert 0 < fill["fill"] <= fill["best_fill"] <= 1 <= fill["ranks_max_over_mean"]
    table = capsys.readouterr().out
    assert all(word in table for word in ("rectangles", "best possible", "fewest possible"))
