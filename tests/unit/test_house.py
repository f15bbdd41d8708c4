"""Rules of the house that a machine can hold: places of things,
and words banned from every file."""

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "common config algorithms storage huggingface data kernels platform checks models servers rewards envs queue"
    " training rollout weight_sync checkpointing telemetry commands"
).split()
PACKAGES = [*(f"megatron_dapo/{part}" for part in PARTS), "megatron_dapo", "launch", "examples", "checkpoints_tools"]
FOLDERS = (
    "configs",
    "docs",
    "requirements",
    "tests/unit",
    "tests/compile",
    "tests/distributed",
    "tests/e2e",
    "tests/slurm",
    "tests/gpu",
)
CODE = ("megatron_dapo", "launch", "examples", "benchmarks", "checkpoints_tools", "requirements", "tests")
PROGRAM = ("megatron_dapo", "launch", "checkpoints_tools")
# replaced names, and their successors
REPLACED = {
    "Entrant": "ServerMember",
    "Mixture": "MoEConfig",
    "Place": "RankStatus, RankVariables, RankCoordinates",
    "blame": "culprits",
    "come_back": "rejoin",
    "dog": "watchdog",
    "fall_silent": "mute",
    "farewell": "closing",
    "heed": "install",
    "hello": "greeting",
    "inert_checks": "unused_keys",
    "set_going": "resume",
}
# variables are named after their contents; these tell only of origin or owner
UNCLEAR = {"found", "given", "mine", "pieces", "theirs", "told"}
MAX_LINES = 500
# written so that this file keeps its own rules
NEVER = {
    "ends processes by name": re.compile(r"\b(p" + r"kill|kill" + r"all)\b"),
    "a path of one machine": re.compile(r"(?<![\w.}$])/(root|home|work|Users)/\w"),
    "a place where packages come from": re.compile(r"--(extra-)?index-ur[l]|--find-link[s]|--trusted-hos[t]"),
    "unfinished": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
}


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders or CODE for path in sorted((ROOT / folder).rglob("*.py"))]


def text_files() -> list[Path]:
    kinds = (".py", ".sh", ".md", ".yaml", ".toml", ".txt", ".in")
    files = [path for folder in (*CODE, "docs", "configs", "slurm") for path in (ROOT / folder).rglob("*")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    return [*(path for path in files if path.suffix in kinds and path.is_file()), ROOT / "Makefile", ROOT / ".ci/run"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Facts:
    """A Python file as far as the rules ask. adaptations:
    CPU adaptations imported along with it."""

    docstring: str | None
    swallowing: list[int]
    adaptations: list[str]
    classes: list[tuple[str, int]]
    unclear: list[str]


@cache
def facts(path: Path) -> Facts:
    """Read a file once for all rules."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    return Facts(
        docstring=ast.get_docstring(tree),
        swallowing=swallows(nodes),
        adaptations=adaptations_imported_on_load(tree),
        classes=[(node.name, node.lineno) for node in nodes if isinstance(node, ast.ClassDef)],
        unclear=unclear_variables(nodes),
    )


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def swallows(nodes: Sequence[ast.AST]) -> list[int]:
    """Lines of handlers that catch everything and do nothing."""
    broad = ("Exception", "BaseException")
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in broad))
        and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)
    ]


def adaptations_imported_on_load(tree: ast.Module) -> list[str]:
    """CPU adaptations that importing this module would import: at its top, outside functions."""
    outside_functions, adaptations = list(tree.body), []
    while outside_functions:
        node = outside_functions.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        outside_functions += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        names = (
            [alias.name for alias in getattr(node, "names", [])]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else []
        )
        whole = f"{getattr(node, 'module', '')}.{'.'.join(names)}"
        adaptations += [cpu for cpu in ("megatron_cpu", "sglang_cpu") if names and cpu in whole.split(".")]
    return adaptations


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_says_what_it_is_for(package):
    init = ROOT / package / "__init__.py"
    assert init.is_file(), f"{package} is missing"
    assert ast.get_docstring(ast.parse(init.read_text())), f"{package}/__init__.py has no docstring"


def test_the_house_is_complete():
    missing = [folder for folder in FOLDERS if not (ROOT / folder).is_dir()]
    assert not missing
    license_text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in license_text and "Version 2.0" in license_text and len(license_text) > 11_000


def test_no_file_is_longer_than_a_person_reads():
    long = {name(path): n for path in python_files() if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_every_module_begins_with_what_it_is_for():
    silent = [name(path) for path in python_files() if not facts(path).docstring]
    assert not silent


def test_no_error_is_swallowed():
    offending = [f"{name(path)}:{line}" for path in python_files() for line in facts(path).swallowing]
    assert not offending
    assert swallows(nodes_of("try:\n    f()\nexcept Exception:\n    pass")) == [3]


@pytest.mark.parametrize("what", NEVER)
def test_no_file_contains(what):
    offending = [
        f"{name(path)}:{number}  {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if NEVER[what].search(line)
    ]
    assert not offending, "\n".join(offending)


def test_the_cpu_adaptation_is_loaded_on_demand_only():
    offending = {
        name(path): names
        for path in python_files("megatron_dapo", "launch")
        if "megatron_dapo/platform/" not in path.as_posix() and (names := facts(path).adaptations)
    }
    assert not offending
    sources = (
        "if x:\n    import megatron_dapo.platform.sglang_cpu as s",
        "from megatron_dapo.platform import megatron_cpu",
    )
    assert all(adaptations_imported_on_load(ast.parse(source)) for source in sources)
    assert not adaptations_imported_on_load(
        ast.parse("def f():\n    from megatron_dapo.platform.sglang_cpu import cpu_server")
    )


@pytest.mark.parametrize("layer", ["unit", "distributed", "e2e", "gpu"])
def test_every_test_file_carries_the_marker_of_its_folder(layer):
    unmarked = [
        name(path)
        for path in sorted((ROOT / "tests" / layer).glob("test_*.py"))
        if not re.search(rf"^pytestmark = .*pytest\.mark\.{layer}\b", path.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert not unmarked


def test_no_class_name_exists_twice():
    """Who searches for a class finds one."""
    places: dict[str, list[str]] = {}
    for path in python_files(*PROGRAM):
        for class_name, line in facts(path).classes:
            places.setdefault(class_name, []).append(f"{name(path)}:{line}")
    twice = {class_name: where for class_name, where in places.items() if len(where) > 1}
    assert not twice


def identifiers(source: str) -> set[str]:
    """All names in a Python source, without the underscores that begin them."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string.lstrip("_") for token in tokens if token.type == tokenize.NAME}


def test_no_name_that_was_replaced_comes_back():
    """Neither in code nor, in backticks, in the docs."""
    offending = {
        name(path): old for path in python_files(*PROGRAM) if (old := identifiers(path.read_text()) & REPLACED.keys())
    }
    for path in (ROOT / "docs").glob("*.md"):
        words = {word for span in re.findall(r"`([^`\n]+)`", path.read_text()) for word in re.findall(r"\w+", span)}
        if old := words & REPLACED.keys():
            offending[name(path)] = old
    assert not offending, f"{offending}; the names in use are {REPLACED}"


def unclear_variables(nodes: Sequence[ast.AST]) -> list[str]:
    """Return "line: name" of variables and parameters in UNCLEAR.
    Fields of a class are attributes: not meant."""
    fields = {
        statement.target
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    bound = [(node.lineno, node.arg) for node in nodes if isinstance(node, ast.arg)]
    bound += [
        (node.lineno, node.id)
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields
    ]
    return [f"{line}: {word}" for line, word in sorted(bound) if word in UNCLEAR]


def test_variables_are_named_after_what_they_hold():
    unclear = {name(path): lines for path in python_files() if (lines := facts(path).unclear)}
    assert not unclear
