"""The recipes of configs/, also inside the installed package: `--config-name demo` is `--config
.../configs/demo.yaml`."""

import argparse
from pathlib import Path

from megatron_dapo.config.loader import nearest

# in a checkout a link to the folder configs/
RECIPES = (Path(__file__).resolve().parents[1] / "configs").resolve()


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --config FILE and --config-name NAME, at most one of them. `arguments.config`
    is then a path, or None without either."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--config", metavar="FILE", type=config_file, help="YAML file; without it every key has its default"
    )
    either.add_argument(
        "--config-name", dest="config", metavar="NAME", type=recipe, help="one of the recipes: configs/NAME.yaml"
    )


def recipe_names() -> list[str]:
    return sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml"))


def config_file(path: str) -> str:
    """Return the path; if there is no such file, that of the package's recipe configs/NAME.yaml, if
    it is one."""
    name = path.removeprefix("configs/").removesuffix(".yaml")
    if path == f"configs/{name}.yaml" and not Path(path).exists() and name in recipe_names():
        return str(RECIPES / f"{name}.yaml")
    return path


def recipe(name: str) -> str:
    """Return the path of configs/NAME.yaml. Raises ArgumentTypeError with the known recipes."""
    known = recipe_names()
    if name in known:
        return str(RECIPES / f"{name}.yaml")
    near = nearest(name, known) if known else None
    raise argparse.ArgumentTypeError(
        f"there is no configs/{name}.yaml{f'; the nearest is {near}' if near else ''}; "
        f"known are {', '.join(known) or 'none'}"
    )
