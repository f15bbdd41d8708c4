"""Names on the pages exist: links with their anchors, files, functions;
README leads to every page."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_dapo.config.yaml_dialect import parse_yaml

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *DOCS,
    *(ROOT / folder / "README.md" for folder in ("examples", "benchmarks", "tests/seeds")),
]
CODE = ("megatron_dapo", "launch", "examples", "benchmarks", "checkpoints_tools", "tests")
FOLDERS = "|".join((*CODE, "configs", "slurm", "docs", "requirements"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(text_of(page)) if "://" not in link]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", text_of(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def definitions(path: Path) -> set[str]:
    """Functions, classes and variables of a file: `name`, and `Class.name` inside a class."""
    names = set()
    for node in ast.parse(text_of(path)).body:
        names |= names_bound(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner}" for part in node.body for inner in names_bound(part)}
    return names


def names_bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def is_known(dotted: str) -> bool:
    """Whether a dotted name is a package, a module, or a definition in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        rest = ".".join(parts[length:])
        if path.with_suffix(".py").is_file():
            return not rest or rest in definitions(path.with_suffix(".py"))
        if path.is_dir():
            return not rest or (path / "__init__.py").is_file() and rest in definitions(path / "__init__.py")
    return False


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_row_of_a_table_is_one_line(page):
    assert not [line for line in text_of(page).splitlines() if line.startswith("| ") and not line.endswith(" |")]


@pytest.mark.parametrize("start", ["README.md", "docs/README.md"])
def test_every_page_of_the_docs_is_linked(start):
    page = ROOT / start
    linked = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
    assert not [name(other) for other in DOCS if other != page and other not in linked]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_is_named_exists(page):
    files = set(
        re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]+\.(?:py|sh|yaml|json|md|svg|ini|txt))\b", text_of(page))
    )
    assert not [file for file in sorted(files) if "NAME" not in file and not (ROOT / file).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_test_on_a_page_exists(page):
    # test_freq is a config key
    known = {path.stem for path in (ROOT / "tests").rglob("test_*.py")} | {"test_freq"}
    for path in (ROOT / "tests").rglob("test_*.py"):
        known |= definitions(path)
    assert not set(re.findall(r"\btest_\w+", text_of(page))) - known


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_function_that_is_named_with_its_file_exists(page):
    """As in `megatron_dapo/trainer.py: train`, with several names
    after one file separated by commas."""
    missing = []
    for file, names in re.findall(rf"`((?:{FOLDERS})/[\w/]+\.py): ([\w., ]+)`", text_of(page)):
        known = definitions(ROOT / file) if (ROOT / file).is_file() else set()
        missing += [f"{file}: {one}" for one in names.split(", ") if one not in known]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_dotted_name_of_the_code_exists(page):
    dotted = set(re.findall(rf"(?<![\w./-])((?:{'|'.join(CODE)})(?:\.[A-Za-z_]\w*)+)(?![\w/(-])", text_of(page)))
    assert not [one for one in sorted(dotted) if not one.endswith((".md", ".py", ".log")) and not is_known(one)]


def test_the_hooks_before_a_commit_run_what_make_lint_runs():
    recipe = re.search(r"(?m)^lint:.*\n((?:\t.*\n)+)", text_of(ROOT / "Makefile"))[1]
    commands = re.findall(r"\t@?\$\(BIN\)/(.*)", recipe)
    hooks = parse_yaml(text_of(ROOT / ".pre-commit-config.yaml"))[0]["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [f".venv/bin/{command}" for command in commands]
    assert all(hook["language"] == "system" for hook in hooks), "nothing is downloaded"
