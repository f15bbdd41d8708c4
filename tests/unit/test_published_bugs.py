"""docs/exactness.md and the injectable bugs agree; `make mutation ARGS=published` puts them in."""

import ast
import re

import pytest

from tests.distributed.layout_runs import restricted
from tests.mutation.published import BUGS, ROOT, PublishedBug

pytestmark = pytest.mark.unit

PAGE = (ROOT / "docs/exactness.md").read_text()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_can_still_be_put_in(bug: PublishedBug):
    """And leaves a file that Python reads: a syntax error would be noticed by any test."""
    source = bug.source()
    assert source != (ROOT / bug.path).read_text()
    ast.parse(source)


def test_a_bug_in_changed_code_is_reported():
    bug = PublishedBug("moved", "megatron_dapo/trainer.py", "text that is not there", "", "")
    with pytest.raises(ValueError, match="moved: its text stands 0 times in megatron_dapo/trainer.py"):
        bug.source()


def test_the_page_names_every_bug_and_the_test_that_notices_it():
    rows = re.findall(r"\| `([\w-]+)`.*\| `(tests/[\w/]+\.py): (\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 20
    bugs = [(bug.name, *bug.test.partition("[")[0].split("::")) for bug in BUGS]
    assert sorted(rows) == sorted(bugs)


def test_a_comparison_of_two_layouts_runs_these_two():
    layouts = {
        1: {"tp1": ({}, {"whole": [], "kl": []})},
        2: {"tp2": ({"tp": 2}, {"small": []}), "pp2": ({}, {"small": []})},
    }
    chosen = restricted(layouts, ["tp1/whole", "tp2/small"])
    assert chosen == {1: {"tp1": ({}, {"whole": []})}, 2: {"tp2": ({"tp": 2}, {"small": []})}}
    assert restricted(layouts, ["tp1/kl"]) == {1: {"tp1": ({}, {"kl": []})}}


def test_a_bug_of_a_layout_names_its_case_and_the_one_it_is_compared_with():
    for bug in BUGS:
        if "test_layouts.py" in bug.test:
            case, base = bug.cases
            assert case != base and "/" in case and base.startswith("tp1/"), bug.name
