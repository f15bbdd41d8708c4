"""Environments by name: the built-in table and classes by import path."""

import difflib
from collections.abc import Callable
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import import_attribute
from megatron_dapo.config.built_ins import BUILT_IN_ENVIRONMENTS
from megatron_dapo.envs.environment import Environment

KEY = "actor_rollout_ref.rollout.multi_turn.environment"


def check_environment(name: str) -> None:
    """Raise UserError for a name that is neither in the table nor an import path. Imports
    nothing."""
    if name in BUILT_IN_ENVIRONMENTS or ":" in name:
        return
    near = difflib.get_close_matches(name, BUILT_IN_ENVIRONMENTS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"{KEY}: {name!r} is not known; use {', '.join(BUILT_IN_ENVIRONMENTS)}, or package.module:Class.{hint}"
    )


def make(name: str, kwargs: dict[str, Any]) -> Environment:
    """Return a new environment.

    Raises:
        UserError: if it cannot be imported or does not take these keyword arguments.
    """
    path = BUILT_IN_ENVIRONMENTS.get(name, name)
    factory: Callable[..., Environment] = import_attribute(KEY, path, "package.module:Class", name=name)
    try:
        return factory(**kwargs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{KEY}: {name} cannot be made with environment_kwargs {kwargs} ({type(error).__name__}: {error}); "
            f"correct them."
        ) from error
