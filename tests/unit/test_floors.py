"""Imports point down: a folder of the program imports only lower floors and itself.

The core is the code of a training step. Beside it stand the commands and the launcher;
it never imports them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (
    ("common", "public_names"),
    ("config", "algorithms"),
    ("storage",),
    ("huggingface",),
    ("estimates",),
    ("data", "kernels", "platform", "checks"),
    ("models", "servers", "rewards"),
    ("agents", "envs", "queue"),
    ("training", "rollout", "weight_sync", "checkpointing", "telemetry"),
    ("run_setup", "first_look", "placement"),
    ("job", "sft_job"),
    ("trainer", "sft"),
    ("commands",),
    ("__main__", "launch"),
    ("library",),
)
BESIDE = ("commands", "__main__", "launch", "library")  # the core, all other parts, never imports them
MAX_FILES, MAX_LINES = 25, 3700  # of a room: a folder without its subfolders
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# they may use the program, not the reverse
OUTSIDE = ("examples", "tests", "benchmarks", "checkpoints_tools")


def part_of(module: str) -> str | None:
    """`megatron_dapo.servers.client` -> `servers`; None for other people's modules
    and for `megatron_dapo` itself."""
    names = module.split(".")
    if names[0] == "megatron_dapo":
        return names[1] if len(names) > 1 else None
    return names[0] if names[0] in ("launch", *OUTSIDE) else None


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of a module, in functions too;
    relative imports resolved."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """One sentence per import that does not point strictly down or into the own part."""
    own = part_of(module)
    problems = []
    for line, name in imported(ast.parse(source), module, is_package):
        other = part_of(name)
        if other is None or other == own:
            continue
        if other not in FLOOR_OF:
            problems.append(f"{module}:{line} imports {name}, which is on no floor")
        elif own is None or FLOOR_OF[other] >= FLOOR_OF[own]:
            problems.append(f"{module}:{line} imports {name}, which is not below it")
        elif any(part.startswith("_") for part in name.split(".")[1:]):
            problems.append(f"{module}:{line} imports {name}, which is private to {other}")
    return problems


def modules() -> list[tuple[str, Path]]:
    files = [path for folder in ("megatron_dapo", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
    # `site` is not the program: it stands in for packages inside SGLang's own processes
    files = [path for path in files if "site" not in path.relative_to(ROOT).parts]
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path) for path in files]


def test_imports_point_down_only():
    assert len(modules()) > 50, "the program was not found"
    problems = [
        sentence
        for module, path in modules()
        for sentence in violations(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


def test_every_part_of_the_program_has_a_floor():
    parts = {part_of(module) for module, _ in modules()} - {None}
    assert parts <= FLOOR_OF.keys(), f"no floor for {sorted(parts - FLOOR_OF.keys())}"


def test_the_core_imports_nothing_that_stands_beside_it():
    """Follows from the order of the floors, as long
    as the parts beside the core are above all of it."""
    lowest = min(FLOOR_OF[part] for part in BESIDE)
    assert {part for part, floor in FLOOR_OF.items() if floor >= lowest} == set(BESIDE)


def test_a_room_can_be_read_in_a_day():
    rooms: dict[Path, list[Path]] = {}
    for _, path in modules():
        rooms.setdefault(path.parent, []).append(path)
    sizes = {
        str(room.relative_to(ROOT)): (len(files), sum(len(path.read_text().splitlines()) for path in files))
        for room, files in rooms.items()
    }
    too_large = {room: size for room, size in sizes.items() if size[0] > MAX_FILES or size[1] > MAX_LINES}
    assert not too_large, f"at most {MAX_FILES} files and {MAX_LINES} lines"


def test_file_names_are_unique_in_the_core():
    places: dict[str, list[str]] = {}
    for module, path in modules():
        if part_of(module) not in BESIDE and path.name != "__init__.py":
            places.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert not [files for files in places.values() if len(files) > 1]


def test_a_package_holds_a_docstring_and_nothing_else():
    """Except for preparations that every room needs before its first import of megatron.core, and
    the version and the public names of the program."""
    prepare = "from megatron_dapo.platform.device import prepare_megatron\nprepare_megatron()"
    more = [
        str(path.relative_to(ROOT))
        for _, path in modules()
        if path.name == "__init__.py" and path.parent.name != "megatron_dapo"
        if ast.unparse(ast.parse(path.read_text()).body[1:]) not in ("", prepare)  # type: ignore[arg-type]
    ]
    assert not more


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_dapo.config.loader", "import megatron_dapo.data.samples"),
        ("megatron_dapo.common.errors", "from megatron_dapo.config import Config"),
        ("megatron_dapo.config.loader", "from megatron_dapo.algorithms import kl"),  # beside it
        ("megatron_dapo.data.packing", "from megatron_dapo import trainer"),
        ("megatron_dapo.servers.client", "from ..training import policy"),
        ("megatron_dapo.servers.client", "def f():\n    from megatron_dapo.weight_sync import sync"),
        ("megatron_dapo.models.build", "if True:\n    import launch.local"),
        ("megatron_dapo.__main__", "import launch"),
        ("megatron_dapo.trainer", "from tests.helpers import run_torchrun"),
        ("megatron_dapo.trainer", "from megatron_dapo.config.loader import _parse"),
        ("megatron_dapo.trainer", "from megatron_dapo.nowhere import thing"),
        # else every import of a part imports config
        ("megatron_dapo", "from megatron_dapo.config import Config"),
    ],
)
def test_an_import_that_points_elsewhere_is_found(module, source):
    assert violations(source, module, is_package=module == "megatron_dapo")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_dapo.trainer", "from megatron_dapo.rollout import RolloutHandle\nimport torch"),
        ("megatron_dapo.servers.client", "from . import errors\nfrom .errors import _hidden"),
        ("megatron_dapo.servers.client", "from megatron_dapo.common.errors import UserError\nfrom ..data import types"),
        ("launch.local", "import megatron_dapo\nfrom megatron_dapo.trainer import train\nfrom .stop_signals import x"),
    ],
)
def test_an_import_that_points_down_is_allowed(module, source):
    assert violations(source, module) == []
