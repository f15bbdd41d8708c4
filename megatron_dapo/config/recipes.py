"""The recipes of configs/ by name: `--config-name demo` is `--config .../configs/demo.yaml`."""

import argparse
from pathlib import Path

from megatron_dapo.config.loader import nearest

RECIPES = Path(__file__).resolve().parents[2] / "configs"


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --config FILE and --config-name NAME, at most one of them. `arguments.config`
    is then a path, or None without either."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--config", metavar="FILE", help="YAML file; without it every key has its default")
    either.add_argument(
        "--config-name", dest="config", metavar="NAME", type=recipe, help="one of the recipes: configs/NAME.yaml"
    )


def recipe(name: str) -> str:
    """Return the path of configs/NAME.yaml. Raises ArgumentTypeError with the known recipes."""
    known = sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml"))
    if name in known:
        return str(RECIPES / f"{name}.yaml")
    near = nearest(name, known) if known else None
    raise argparse.ArgumentTypeError(
        f"there is no configs/{name}.yaml{f'; the nearest is {near}' if near else ''}; "
        f"known are {', '.join(known) or 'none'}"
    )
