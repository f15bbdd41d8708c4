"""docs/api.md: every public name with its signature and its docstring, from the sources.

python -m tests.api_reference > docs/api.md
"""

import ast
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.public_names import SECTIONS

_HEAD = """\
# Python reference

Made by `python -m tests.api_reference > docs/api.md` from the docstrings; do not edit. Examples are in
[python.md](python.md).

`from megatron_dapo import NAME` imports a name, and its module only then. These names are public: a changed one is in
[CHANGELOG.md](../CHANGELOG.md). Every other name may change in any version. Letters at the end of a name are the
dimensions of a tensor ([CONTRIBUTING.md](../CONTRIBUTING.md#rules-of-the-code)).
"""
_WIDTH = 100
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def api_reference() -> str:
    """Return Markdown: a section per group of names, an entry per name."""
    parts = [_HEAD]
    for title, modules in SECTIONS.items():
        parts.append(f"## {title}\n")
        for module, names in modules.items():
            for name in names.split():
                parts += [f"### {name}\n", *_entry(name, module)]
    return "\n".join(parts)


def _entry(name: str, module: str) -> Iterator[str]:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is in the list of public names"
    source = Path(spec.origin).read_text(encoding="utf-8")
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    if isinstance(node, ast.ClassDef):
        yield from _class_entry(node, source.splitlines())
    elif isinstance(node, _Function):
        yield from (_signature(node, name), _text(node))


def _class_entry(node: ast.ClassDef, lines: Sequence[str]) -> Iterator[str]:
    yield _text(node)
    if fields := [part for part in node.body if isinstance(part, ast.AnnAssign)]:
        yield _code(*(line[4:] for line in _field_lines(node, lines)))
    functions = [part for part in node.body if isinstance(part, _Function)]
    for function in functions:
        if function.name == "__init__" and not fields:
            yield from (_signature(function, node.name), _text(function))
        elif not function.name.startswith("_"):
            yield from (_signature(function, f"{node.name}.{function.name}"), _text(function))


def _field_lines(node: ast.ClassDef, lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of a class's fields, with their comments and docstrings."""
    is_documented = ast.get_docstring(node) is not None
    first = node.body[0].end_lineno if is_documented else node.lineno
    functions = [part for part in node.body if isinstance(part, _Function)]
    last = min(
        (line.lineno for part in functions for line in (part, *part.decorator_list)), default=(node.end_lineno or 0) + 1
    )
    return [line for line in lines[first : last - 1] if line.strip()]


def _signature(node: _Function, name: str) -> str:
    """Return a call as a block of code; of a long one every parameter on its own line."""
    if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
        returned = ast.unparse(node.returns) if node.returns else ""
        return _code(f"{name}: {returned}")
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args.pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not node.name.startswith("__") else ""
    returns = returns.replace("'", "")
    text = re.sub(r"(?<=[\w\])])=(?=\S)", " = ", ast.unparse(arguments))
    whole = f"{name}({text}){returns}"
    if len(whole) <= _WIDTH:
        return _code(whole)
    # a comma within brackets parts no parameters
    parameters = re.split(r", (?![^\[(]*[\])])", text)
    return _code(f"{name}(", *(f"    {each}," for each in parameters), f"){returns}")


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```", ""])


def _text(node: ast.ClassDef | _Function) -> str:
    """Return a docstring as Markdown: a section such as `Args:` becomes a list."""
    lines: list[str] = []
    in_section = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises):", line):
            lines += [line, ""]
            in_section = True
        elif in_section and re.match(r" {4}\S", line):
            lines.append(re.sub(r"^ {4}(\w+):", r"- `\1`:", line))
        elif in_section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line
            lines.append(line)
    return "\n".join([*lines, ""]) if lines else ""


if __name__ == "__main__":
    print_line(api_reference().removesuffix("\n"))
