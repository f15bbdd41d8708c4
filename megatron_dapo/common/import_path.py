"""Imports what a config key names as `package.module:attribute`, and says in one sentence why it cannot."""

import importlib
from typing import Any

from megatron_dapo.common.errors import UserError


def import_attribute(key: str, path: str, form: str, name: str | None = None) -> Any:
    """Import `package.module:attribute`, whose code is the user's. Raises UserError with one sentence.

    Args:
        key: the config key that names it.
        path: what to import.
        form: what the path must look like, e.g. `package.module:function`.
        name: what the user wrote, where that is not the path but the name of something built in.
    """
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except SystemExit as error:
        raise UserError(
            f"{key}: {module_name} ends its process while it is imported, by sys.exit({error.code!r}); let it do that "
            f"only where it is run as a program (if __name__ == '__main__')."
        ) from error
    except Exception as error:
        raise UserError(
            f"{key}: cannot import {name or path!r} ({type(error).__name__}: {error}); it must be {form}, importable "
            f"from the folder the run is started in."
        ) from error
