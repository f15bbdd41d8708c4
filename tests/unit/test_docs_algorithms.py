"""docs/algorithms.md has every option with its default;
tests/seeds/README.md names existing code and tests."""

import re
from pathlib import Path

import pytest

from megatron_dapo.config.aliases import canonical
from megatron_dapo.config.built_ins import ESTIMATORS
from megatron_dapo.config.keys import known_keys, show
from megatron_dapo.config.yaml_dialect import parse_yaml
from tests.unit.test_seeds import CHOICES, CONFIGS, OPTIONS, leaves

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = ("", "algorithm.overlong_reward_shaping.", "actor_rollout_ref.actor.")
PLACES = (ROOT / "tests" / "seeds" / "README.md").read_text(encoding="utf-8")


def rows(text: str, first: str, num_cells: int) -> list[list[str]]:
    """The cells of each table row that begins with `first` and has `num_cells` cells."""
    lines = [line for line in text.splitlines() if line.startswith("| " + first)]
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in split if len(row) == num_cells]


def is_option(row: list[str]) -> bool:
    names = re.findall(r"`([\w.]+)`", row[0])
    return any(canonical(section + name) in known_keys() for section in SECTIONS for name in names)


OPTION_ROWS = [row for row in rows(TEXT, "`", 3) if is_option(row)]
PLACE_ROWS = rows(PLACES, "0", 4)


def names_in(cell: str) -> list[str]:
    """Whole keys: a name without dots stands in the section of the first of its cell,
    or of its table."""
    first, *others = re.findall(r"`([\w.]+)`", cell)
    (whole,) = {canonical(s + first) for s in SECTIONS if canonical(s + first) in known_keys()}
    return [whole, *(f"{whole.rpartition('.')[0]}.{other}" for other in others)]


def test_the_defaults_of_the_options_are_those_of_the_schema():
    assert len(OPTION_ROWS) > 30
    for row in OPTION_ROWS:
        keys = names_in(re.sub(r" \(or `\w+`\)", "", row[0]))
        defaults = [show(known_keys()[key].default).strip("'") for key in keys]
        assert row[1].split(", ") == defaults, row


def test_every_option_of_the_algorithm_is_on_the_page():
    """Of actor and critic only the keys of learning; model, layout and speed are in config.md."""
    elsewhere = r".*\.(model|optim|megatron)\..*|.*\.(max_tokens_per_microbatch|log_prob_chunk_size|fused_kernels)"
    sections = ("algorithm.", "exp_manager.", "critic.", "actor_rollout_ref.actor.")
    keys = [key for key in known_keys() if key.startswith(sections) and not re.fullmatch(elsewhere, key)]
    assert len(keys) > 50
    assert not [key for key in keys if not re.search(rf"`([\w.]+\.)?{key.rpartition('.')[2]}(`|:)", TEXT)]


def test_the_table_of_estimators_is_that_of_the_code():
    per = {re.findall(r"`(\w+)`", row[0])[0]: row[1] for row in rows(TEXT, "`", 4) if row[1] in ("response", "token")}
    assert per == {name: "token" if row.per_token else "response" for name, row in ESTIMATORS.items()}


def test_no_page_has_another_list_of_estimators():
    """A new estimator would be missing there."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    name = f"`?({'|'.join(ESTIMATORS)})`?"
    lists = {page.name: re.findall(rf"\b{name}(?:,? and |,? or |, ){name}\b", page.read_text()) for page in pages}
    made = lists.pop("config.md")  # from the schema, which reads the table
    assert made and not any(lists.values())


def test_the_code_and_the_tests_of_the_table_exist():
    assert len(PLACE_ROWS) > 50
    for _, _, code, test in PLACE_ROWS:
        path, name = code.strip("`").split(": ")
        assert re.search(rf"^( *(def|class) )?{name}\b", (ROOT / "megatron_dapo" / path).read_text(), re.M), code
        path, name = test.strip("`").split(": ")
        assert re.search(rf"^def {name}\(", (ROOT / "tests/unit" / path).read_text(), re.M), test


def test_every_key_of_the_documents_is_in_the_table():
    named = {name for row in PLACE_ROWS for name in re.findall(r"`([\w./]+)`", row[1])}
    of_blocks = {key for text in CONFIGS.values() for key, _ in leaves(parse_yaml(text)[0])}
    keys = {canonical(key) for key in (*of_blocks, *CHOICES, *(key for key, _, _ in OPTIONS))}
    assert not keys - {canonical(name) for name in named}
