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


def test_public_names_are_classes_and_functions_at_the_top_and_stand_ins_stand_apart(tree):
    rows = {row[0]: row[1:] for row in cells(house.sums, tree)}
    assert rows["product"] == ["3", "4,020", "1", "1", "2"]
    assert rows["site"] == ["folders", "1", "1", "1", "0", "1"]
    assert rows["tests"] == ["1", "1", "0", "1", "1"]


def test_a_record_type_that_is_gone_is_named(tree, capsys):
    assert "Sample" not in tree.missing_records()
    assert house.main([str(tree.root)]) == 1
    assert "No class of the product is called Prompt, Generation, " in capsys.readouterr().err
