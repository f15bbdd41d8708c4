"""Imports the `package.module:attribute` of a config key, and explains in one sentence why it
cannot."""

import ast
import difflib
import importlib.util
import symtable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from megatron_dapo.common.errors import UserError


def import_attribute(key: str, path: str, form: str, name: str | None = None) -> Any:
    """Import `package.module:attribute`, code of the user.

    Args:
        key: the config key that names it.
        path: the path to import.
        form: the required form, e.g. `package.module:function`.
        name: the user's own spelling, if `path` comes from a built-in name.

    Raises:
        UserError: with one sentence.
    """
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except SystemExit as error:
        raise UserError(
            f"{key}: {module_name} calls sys.exit({error.code!r}) while it is imported; move that below "
            f"if __name__ == '__main__'."
        ) from error
    except UserError:  # the module's own message
        raise
    except Exception as error:
        raise UserError(
            f"{key}: cannot import {name or path!r} ({type(error).__name__}: {error}); it must be {form}, importable "
            f"from the folder the run is started in."
        ) from error


def fault_without_import(path: str, num_arguments: int | None = None) -> str | None:
    """Return why `package.module:attribute` cannot be imported, or called with a number of
    arguments, judged by its source files; None if they do not tell.

    No code of the module or its packages runs: it may be slow, need a GPU, or import packages that
    this machine lacks. Names that only running it would show, such as those of `from x import *`,
    are no fault.

    The fault is a clause with the cure, to follow "KEY is PATH, ".
    """
    module, _, attribute = path.partition(":")
    try:
        source = _source(module)
        if source is None or (names := _names_bound_by(source, module)) is None:
            return None
        if attribute in names:
            return None if num_arguments is None else _fault_of_call(source, attribute, num_arguments)
    except ModuleNotFoundError as error:
        return (
            f"but the module {error.name} is not found from the current folder; correct the name, or "
            f"start the run in the module's folder."
        )
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        return f"but the module {module} is not Python: {error}; correct it."
    near = difflib.get_close_matches(attribute, names, n=1)
    return (
        f"but the module {module} defines no {attribute}; correct the name"
        f"{f', the nearest is {near[0]}' if near else ''}."
    )


def _fault_of_call(source: str, name: str, number: int) -> str | None:
    """Return why the one `def` that binds a name does not take a number of arguments, or None."""
    binding = [
        node
        for node in ast.walk(ast.parse(source))
        if name in (getattr(node, field, "") for field in ("name", "asname", "id"))
        and not isinstance(getattr(node, "ctx", None), ast.Load)
    ]
    if len(binding) != 1 or not isinstance(binding[0], ast.FunctionDef) or binding[0].decorator_list:
        return None
    takes = binding[0].args
    most = len(takes.posonlyargs) + len(takes.args)
    if None not in takes.kw_defaults and most - len(takes.defaults) <= number and (takes.vararg or number <= most):
        return None
    return f"but {name}({ast.unparse(takes)}) is called with {number} argument{'s' * (number > 1)}; correct it."


def _source(module: str) -> str | None:
    """Return the source of a module, or None without readable source. Raises
    ModuleNotFoundError."""
    parts = module.split(".")
    spec = _find(parts[0], None)
    for end in range(2, len(parts) + 1):
        spec = spec and _find(".".join(parts[:end]), spec)
    if spec is None:
        return None
    if spec.origin is None and spec.submodule_search_locations is not None:
        return ""  # a folder without __init__.py
    return _read(spec)


def _find(name: str, package: ModuleSpec | None) -> ModuleSpec | None:
    """Return the location of a module; None if only running its package would tell. Raises
    ModuleNotFoundError."""
    if package is None:
        try:
            spec = importlib.util.find_spec(name)  # of a name without dots: no code runs
        except ValueError:  # a module that was made, not found
            return None
    elif package.submodule_search_locations is None:
        spec = None
    elif "__path__" in (_read(package) or ""):
        return None
    else:
        # without its package's name: of a folder without __init__.py the finder would look that up
        # among the imported
        spec = PathFinder.find_spec(name.rpartition(".")[2], list(package.submodule_search_locations))
    if spec is None:
        raise ModuleNotFoundError(name=name)
    return spec


def _read(spec: ModuleSpec) -> str | None:
    try:
        return spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    except (AttributeError, ImportError):  # a loader without source, or a wrong encoding
        return None


def _names_bound_by(source: str, module: str) -> set[str] | None:
    """Return the names bound at a module's top level; None if it may bind others at run time."""
    tree = ast.parse(source, module)
    if any(_may_bind_any_name(node) for node in ast.walk(tree)):
        return None
    symbols = symtable.symtable(source, module, "exec").get_symbols()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return None if "__getattr__" in names else names


def _may_bind_any_name(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    if isinstance(node, ast.Attribute):
        return node.attr == "modules" and isinstance(node.value, ast.Name) and node.value.id == "sys"
    return isinstance(node, ast.Global) or (
        isinstance(node, ast.Name) and node.id in ("globals", "locals", "vars", "exec")
    )
