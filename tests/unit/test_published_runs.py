"""Published runs beside the estimate: the figures of docs/plan.md are computed anew."""

from pathlib import Path

import pytest

from benchmarks.compare_published import comparison

pytestmark = pytest.mark.unit

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
CLAIMED = 0.25


@pytest.fixture(scope="module")
def table():
    """The rows of docs/plan.md, computed anew: (run, part) -> line."""
    rows = {}
    for name, part, seconds, estimate in comparison():
        ratio = estimate / seconds
        rows[name, part] = (f"| {name} | {part} | {seconds:g} | {estimate:.0f} | {ratio:.2f} |", ratio)
    return rows


def test_the_page_has_the_published_runs_as_they_are_estimated_today(table):
    missing = [line for line, _ in table.values() if line not in PAGE]
    assert not missing, "\n".join(missing)


def test_what_the_page_claims_is_within_a_quarter(table):
    within, beyond = PAGE.split("### Within a quarter")[1].split("### Not within a quarter")
    claimed = [ratio for line, ratio in table.values() if line in within]
    assert len(claimed) >= 7
    assert all(abs(ratio - 1) <= CLAIMED for ratio in claimed)
    assert all(abs(ratio - 1) > CLAIMED for line, ratio in table.values() if line in beyond)
