"""Imports that a function makes in its calls, made before them: the deadline of a call is not for
loading libraries."""

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import suppress

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def import_ahead(path: str) -> None:
    """Import the modules that the calls of `package.module:name` will import.

    They are those of that function or class, and of the definitions it uses in its module. Failed
    imports are left to the call, which may not need them.
    """
    module_name, _, name = path.partition(":")
    with suppress(OSError, TypeError, SyntaxError):  # no source to read
        module = importlib.import_module(module_name)
        tree = ast.parse(inspect.getsource(module))
        for node in _used_definitions(tree, name):
            for name_to_import in _imports(node):
                with suppress(Exception, SystemExit):
                    importlib.import_module(importlib.util.resolve_name(name_to_import, module.__package__ or None))


def _used_definitions(tree: ast.Module, name: str) -> list[_Definition]:
    """Return the definition of that name and, recursively, the module's definitions used by it."""
    known = {node.name: node for node in tree.body if isinstance(node, _Definition)}
    used: dict[str, _Definition] = {}
    to_do = [name]
    while to_do:
        if (name := to_do.pop()) not in known or name in used:
            continue
        used[name] = known[name]
        to_do += [node.id for node in ast.walk(known[name]) if isinstance(node, ast.Name)]
    return list(used.values())


def _imports(definition: _Definition) -> Iterator[str]:
    """Yield possible names of modules, relative ones with their dots."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            yield from (f"{base}.{alias.name}" if node.module else f"{base}{alias.name}" for alias in node.names)
