"""Imports point down: a folder of the program imports lower floors and itself, nothing beside or above it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (
    ("common",),
    ("config", "algorithms"),
    ("storage",),
    ("huggingface",),
    ("data", "kernels", "platform", "planner"),
    ("models", "rewards"),
    ("envs",),
    ("training", "rollout", "weight_sync", "checkpointing", "telemetry"),
    ("run_setup", "first_look"),
    ("job", "sft_job", "forecast", "evaluation", "report"),
    ("trainer", "sft"),
    ("__main__", "launch"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
OUTSIDE = ("examples", "tests", "benchmarks", "checkpoints_tools")  # they may use the program, not the reverse


def part_of(module: str) -> str | None:
    """`megatron_dapo.rollout.client` -> `rollout`; None for other people's modules and for `megatron_dapo` itself."""
    names = module.split(".")
    if names[0] == "megatron_dapo":
        return names[1] if len(names) > 1 else None
    return names[0] if names[0] in ("launch", *OUTSIDE) else None


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports, in functions too; relative imports resolved."""
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


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_dapo.config.loader", "import megatron_dapo.data.types"),
        ("megatron_dapo.common.errors", "from megatron_dapo.config import Config"),
        ("megatron_dapo.config.loader", "from megatron_dapo.algorithms import kl"),  # beside it
        ("megatron_dapo.data.packing", "from megatron_dapo import trainer"),
        ("megatron_dapo.rollout.client", "from ..training import policy"),
        ("megatron_dapo.rollout.client", "def f():\n    from megatron_dapo.weight_sync import sync"),
        ("megatron_dapo.models.build", "if True:\n    import launch.local"),
        ("megatron_dapo.__main__", "import launch"),
        ("megatron_dapo.trainer", "from tests.helpers import run_torchrun"),
        ("megatron_dapo.trainer", "from megatron_dapo.config.loader import _parse"),
        ("megatron_dapo.trainer", "from megatron_dapo.nowhere import thing"),
        ("megatron_dapo", "from megatron_dapo.config import Config"),  # else every import of a part imports config
    ],
)
def test_an_import_that_points_elsewhere_is_found(module, source):
    assert violations(source, module, is_package=module == "megatron_dapo")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_dapo.trainer", "from megatron_dapo.rollout import RolloutHandle\nimport torch"),
        ("megatron_dapo.rollout.client", "from . import errors\nfrom .errors import _hidden"),
        ("megatron_dapo.rollout.client", "from megatron_dapo.common.errors import UserError\nfrom ..data import types"),
        ("launch.local", "import megatron_dapo\nfrom megatron_dapo.trainer import train\nfrom .stop_signals import x"),
    ],
)
def test_an_import_that_points_down_is_allowed(module, source):
    assert violations(source, module) == []
