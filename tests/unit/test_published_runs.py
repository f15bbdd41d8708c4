"""Published runs beside the estimate: the figures of docs/plan.md are computed anew.

In `make test` those of every fifth run: a change of the estimate changes all.
"""

import re
from pathlib import Path

import pytest

from benchmarks import compare_published
from benchmarks.published_runs import RUNS
from tests.proofs import amount

pytestmark = pytest.mark.unit

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
CLAIMED = 0.25


@pytest.fixture(scope="module")
def table():
    """The rows of docs/plan.md, computed anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_published, "RUNS", RUNS[:: amount(5, 1)])
        return [
            f"| {name} | {part} | {seconds:g} | {estimate:.0f} | {estimate / seconds:.2f} |"
            for name, part, seconds, estimate in compare_published.comparison()
        ]


def test_the_page_has_the_published_runs_as_they_are_estimated_today(table):
    missing = [line for line in table if line not in PAGE]
    assert len(table) >= 4 and not missing, "\n".join(missing)


def ratios(part: str) -> dict[str, float]:
    """The last figure of each row of a part of the page, by run and part of the step."""
    rows = re.findall(r"^\| (.+?\| \w+) \| ([\d.]+) \| (\d+) \| [\d.]+ \|$", part, re.MULTILINE)
    return {name: float(estimate) / float(seconds) for name, seconds, estimate in rows}


def test_what_the_page_claims_is_within_a_quarter():
    within, beyond = map(ratios, PAGE.split("### Within a quarter")[1].split("### Not within a quarter"))
    assert len(within) >= 7 and {name.split(" | ")[0] for name in within | beyond} == {run.name for run in RUNS}
    assert all(abs(ratio - 1) <= CLAIMED for ratio in within.values()), within
    assert all(abs(ratio - 1) > CLAIMED for ratio in beyond.values()), beyond
