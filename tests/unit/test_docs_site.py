"""The site of the pages (`make docs`): its navigation is docs/README.md's, and all that a page leads to is on it."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site" / "pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


def entries() -> list[tuple[str, str]]:
    """Return (title, target) of all sections, behind the home page."""
    sections = [part for section in pages.navigation()[1:] for part in section.values()]
    return [item for part in sections for entry in part for item in entry.items()]


def test_the_navigation_has_every_page_in_the_order_of_the_documentation():
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    in_order = [place.removeprefix("../") for place in re.findall(r"\]\(([\w./]+\.md)\)", text)]
    shown = [target.removeprefix("docs/") for _, target in entries() if target.endswith(".md")]
    assert shown == list(dict.fromkeys(in_order))
    others = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert others <= set(shown)


def test_the_first_link_answers_which_recipe():
    assert entries()[0] == ("Which recipe?", "docs/cluster.html#which-recipe")


def test_the_titles_of_pages_are_different():
    titles = [title for title, _ in entries()]
    assert len(set(titles)) == len(titles)


def test_what_a_page_leads_to_is_on_the_site_and_nothing_else():
    files = pages.files_of_site()
    others = {"README.md", "CONTRIBUTING.md", "docs/processes.svg", "megatron_dapo/trainer.py"}
    assert others <= set(files)
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(files)
    assert all((ROOT / file).is_file() and (ROOT / file).resolve().is_relative_to(ROOT) for file in files)


@pytest.mark.parametrize(
    ("link", "on_site"),
    [
        ("[a page](../docs/install.md#what-it-does)", "[a page](../docs/install.md#what-it-does)"),
        ("[code](agents/program.py)", "[code](agents/program.py.md)"),
        ("[a folder](agents)", "a folder"),
        ("[elsewhere](https://example.org/a.py)", "[elsewhere](https://example.org/a.py)"),
    ],
)
def test_links_stay_but_those_to_code_and_folders(link, on_site):
    assert on_page(f"See {link}.") == f"See {on_site}."


def on_page(markdown: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="examples/README.md"))
    return pages.on_page_markdown(markdown, page, None, None)


def test_code_in_a_table_has_its_own_bars():
    assert on_page(r"| `a\|b` | x\|y |") == r"| `a|b` | x\|y |"
    assert on_page(r"grep `a\|b`") == r"grep `a\|b`"


def test_a_link_that_leads_nowhere_ends_the_build():
    """MkDocs counts the warnings that it prints: a quiet build has none."""
    (build,) = re.findall(r"mkdocs build(.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert not build.partition("#")[0].strip()
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"(?m)^strict: true$", settings)
    assert re.findall(r"(?m)^  (\w+): warn$", settings) == ["absolute_links", "anchors", "unrecognized_links"]


SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_site_is_light_or_dark_as_the_system_until_a_reader_chooses():
    """The theme keeps its first palette until then; one of a fixed colour would stay for ever."""
    media = re.findall(r'(?m)^    - media: "\((.*)\)"', SETTINGS)
    assert media == [f"prefers-color-scheme{colour}" for colour in ("", ": light", ": dark")]


def test_a_search_finds_a_key_by_its_last_part_and_a_version():
    (separator,) = re.findall(r"(?m)^      separator: '(.*)'", SETTINGS)
    assert "filter_mode" in re.split(separator, "algorithm.dynamic_sampling.filter_mode=my_run:has_signal")
    assert "0.16.1" in re.split(separator, "Megatron-core 0.16.1, and others.")


def test_a_search_puts_the_pages_that_name_everything_last():
    for path, meta in (("docs/api.md", {"search": {"boost": 0.3}}), ("docs/rewards.md", {})):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})
        pages.on_page_markdown("", page, None, None)
        assert page.meta == meta
