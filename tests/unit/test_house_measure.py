"""Promise of `make house`: its figures are those of the files,
and a missing record type is named."""

from pathlib import Path

import pytest

from tests import house
from tests.house import House

pytestmark = pytest.mark.unit

CODE = '''"""A module."""

LIMIT = 3  # the number that holds for all


class Sample:
    """What a server wrote, and where."""

    def length(self):
        return 1


def open_file(name: str | None = None):
    def _inside():
        pass


def _private():
    return "that " "is what we need"
'''
CASE = '<testcase classname="tests.{layer}.test_x" name="test" time="{seconds}"/>'
REPORT = '<testsuites><testsuite time="7.4" timestamp="2026-01-02T03:04:05.6+00:00">{cases}</testsuite></testsuites>'


@pytest.fixture
def tree(tmp_path: Path) -> House:
    """Return a checkout of three rooms, a stand-in, a test and three pages."""
    files = {
        "megatron_dapo/a.py": CODE,
        "megatron_dapo/data/b.py": '"""B."""\n' + "x = 1\n" * 4_000,
        "launch/c.py": "",
        "launch/site/torch.py": "class Tensor: ...\n",
        "tests/test_c.py": "def test_c(): ...\n",
        "README.md": "Read this, which is long.\n" + "word " * 30 + "\n",
        "docs/a.md": "one two three\n| what |\n",
        "docs/config.md": "# Config\n\nMade by a script; do not edit.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return House(tmp_path)


def cells(part, checkout: House) -> list[list[str]]:
    return [line.split() for line in part(checkout)]


def test_a_room_is_a_folder_without_its_subfolders_and_large_ones_are_marked(tree):
    (row,) = cells(house.rooms, tree)[1:]
    assert row == ["!", "data", "1", "4,001", "megatron_dapo", "1", "19", "launch", "1", "0"]


def test_public_names_are_classes_and_functions_at_the_top_and_stand_ins_stand_apart(tree):
    rows = {row[0]: row[1:] for row in cells(house.sums, tree)}
    assert rows["product"] == ["3", "4,020", "1", "1", "2"]
    assert rows["site"] == ["folders", "1", "1", "1", "0", "1"]
    assert rows["tests"] == ["1", "1", "0", "1", "1"]


def test_words_of_generated_pages_are_counted_apart(tree):
    _, pages, front, generated, keys, _ = cells(house.docs, tree)
    assert [pages[-2:], front[-2:], generated[-2:]] == [["1", "6"], ["1", "35"], ["1", "9"]]
    assert keys[-1] == "-"  # no module has a schema


def test_functions_are_counted_with_nested_ones(tree):
    first, longest, *_ = house.functions(tree)
    assert first == "4 functions of 2.2 lines, 0 of them over 60; the longest"
    assert longest.split() == ["3", "open_file", "megatron_dapo/a.py:13"]


def test_wording_is_counted_in_text_in_source_and_in_docs(tree):
    page = " ".join(" ".join(house.wording(tree)).split())
    assert " what 2 1 1 " in page  # in the text also the docstring's "What"
    assert " where 1 1 0 " in page
    assert " that is 1 0 0 " in page  # a string in two pieces
    assert page.endswith(" None = 0 1 0 as many 0 0 0")


def test_wide_lines_are_those_of_docstrings_comments_and_pages(tree):
    rows = cells(house.wide_lines, tree)
    assert rows[1] == ["docstrings", "0", "3", "0.0%"]
    assert rows[2] == ["comments", "0", "1", "0.0%"]
    assert rows[4] == ["Markdown", "1", "3", "33.3%"]


def test_the_last_runs_are_read_by_layer_and_a_missing_one_is_a_dash(tree):
    assert cells(house.last_runs, tree)[1:] == [["unit", "-", "-"], ["processes", "-", "-"]]
    cases = CASE.format(layer="e2e", seconds=2.5) + 2 * CASE.format(layer="slurm", seconds=3)
    (tree.root / ".cache").mkdir()
    (tree.root / ".cache/tests-processes.xml").write_text(REPORT.format(cases=cases))
    _, unit, processes, *layers = cells(house.last_runs, tree)
    assert unit == ["unit", "-", "-"]
    assert processes[:3] == ["processes", "3", "7"] and processes[-2:] == ["2026-01-02", "03:04"]
    assert layers == [["layer", "e2e", "1", "2"], ["layer", "slurm", "2", "6"]]


def test_a_record_type_that_is_gone_is_named(tree, capsys):
    assert "Sample" not in tree.missing_records()
    assert house.main([str(tree.root)]) == 1
    assert "No class of the product is called Prompt, Generation, " in capsys.readouterr().err
