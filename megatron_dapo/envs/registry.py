"""Environments by name: the built-in table and classes by import path."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.built_ins import BUILT_IN_ENVIRONMENTS
from megatron_dapo.envs.types import Environment

KEY = "actor_rollout_ref.rollout.multi_turn.environment"


def check_environment(name: str) -> None:
    """Raise UserError for a name that is neither in the table nor an import path. Imports nothing."""
    if name in BUILT_IN_ENVIRONMENTS or ":" in name:
        return
    near = difflib.get_close_matches(name, BUILT_IN_ENVIRONMENTS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"{KEY}: {name!r} is not known; use {', '.join(BUILT_IN_ENVIRONMENTS)}, or package.module:Class.{hint}"
    )


def make(name: str, kwargs: dict[str, Any]) -> Environment:
    """Return a new environment.

    Raises UserError where it cannot be imported or does not take these keyword arguments.
    """
    module_name, _, attribute = BUILT_IN_ENVIRONMENTS.get(name, name).partition(":")
    try:
        factory: Callable[..., Environment] = getattr(importlib.import_module(module_name), attribute)
    except SystemExit as error:
        raise UserError(
            f"{KEY}: {module_name} ends its process while it is imported, by sys.exit({error.code!r}); let it do that "
            f"only where it is run as a program (if __name__ == '__main__')."
        ) from error
    except Exception as error:
        raise UserError(
            f"{KEY}: cannot import {name!r} ({type(error).__name__}: {error}); it must be package.module:Class, "
            f"importable from the folder the run is started in."
        ) from error
    try:
        return factory(**kwargs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{KEY}: {name} cannot be made with environment_kwargs {kwargs} ({type(error).__name__}: {error}); "
            f"correct them."
        ) from error
