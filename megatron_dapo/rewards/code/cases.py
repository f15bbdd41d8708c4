"""The tests of a problem, from its ground truth: the program's inputs, and the expected outputs."""

import ast
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")
_THOUGHT_END = "</think>"
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_TOLERANCE = {"rel_tol": 1e-5, "abs_tol": 1e-8}  # verl's: numpy's defaults
_SHOWN_CHARS = 60
_MAX_INPUT_BYTES = 24 << 20
_PURE: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (abs, all, any, bool, dict, float, frozenset, int, len, list, max, min, round, set, sorted, str)
} | {"sum": sum, "tuple": tuple}
_PARTS = (
    *(ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Call, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Set),
    *(ast.Dict, ast.Subscript, ast.Slice, ast.Attribute, ast.keyword),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)


@dataclass(frozen=True)
class Case:
    """One test. request: for inside.py; passes: judges the program's output."""

    request: dict[str, Any]
    passes: Callable[[str], bool]


def program(response: str) -> str:
    """Return the last block of Python of a response, else its last block of code, else all of
    it."""
    response = response.rpartition(_THOUGHT_END)[2]
    blocks = [(kind.strip().lower(), code) for kind, code in _FENCED.findall(response)]
    python = [code for kind, code in blocks if kind in _PYTHON]
    return (python or [code for _, code in blocks] or [response])[-1]


def read_cases(ground_truth: str) -> list[Case]:
    """Return the tests of a ground truth in the schema of verl and PRIME. Raises ValueError for any
    other.

    JSON: `inputs` and `outputs` (stdin and stdout; with `fn_name` the arguments, a line of JSON
    each, and the function's result), or `assert_case`: assert statements.
    """
    try:
        return _cases(json.loads(ground_truth))
    except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
        raise ValueError(
            f"the ground truth {ground_truth[:_SHOWN_CHARS]!r} holds no tests that code_tests can run ({error}); write "
            f"them as docs/rewards.md#code says"
        ) from None


def _cases(tests: Any) -> list[Case]:
    if not isinstance(tests, dict):
        raise ValueError("it must be a JSON object with inputs and outputs, or assert_case")
    if tests.get("assert_case"):
        asserts = tests["assert_case"]
        cases = [case for text in ([asserts] if isinstance(asserts, str) else asserts) for case in _assert_cases(text)]
        if not cases:
            raise ValueError("assert_case asserts nothing")
        return cases
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("it needs inputs and the same number of outputs, at least one")
    name = tests.get("fn_name")
    make = partial(_call_case, name) if name else _stdin_case
    return [make(given_input, expected) for given_input, expected in zip(inputs, outputs, strict=True)]


def _stdin_case(given_input: str | list[str], expected: str | list[str]) -> Case:
    text = given_input if isinstance(given_input, str) else "\n".join(given_input)
    wanted = expected if isinstance(expected, str) else "\n".join(expected)
    if len(text.encode()) > _MAX_INPUT_BYTES:
        raise ValueError(f"an input is larger than {_MAX_INPUT_BYTES >> 20} MiB")
    return Case({"stdin": text}, partial(same_output, wanted))


def _call_case(name: str, given_input: Any, expected: Any) -> Case:
    arguments = [json.loads(line) for line in given_input.split("\n")] if isinstance(given_input, str) else given_input
    wanted = json.loads(expected) if isinstance(expected, str) else expected
    return Case({"call": name, "arguments": arguments}, partial(_returned, wanted))


def same_output(expected: str, output: str) -> bool:
    """Return whether an output is the expected one but for white space at the ends of lines, and
    rounding of decimals (1e-5 relative)."""
    lines = [line.split() for line in output.strip().splitlines()]
    wanted = [line.split() for line in expected.strip().splitlines()]
    return len(lines) == len(wanted) and all(
        len(line) == len(truth) and all(map(_same_word, truth, line)) for truth, line in zip(wanted, lines, strict=True)
    )


def _same_word(expected: str, word: str) -> bool:
    if word == expected:
        return True
    if expected.lstrip("+-").isdigit() and word.lstrip("+-").isdigit():
        return False
    if not _DECIMAL.fullmatch(expected) or not _DECIMAL.fullmatch(word):
        return False
    return math.isclose(float(word), float(expected), **_TOLERANCE)


def _returned(expected: Any, output: str) -> bool:
    """Return whether the function returned the expected value, or, as in APPS, the only item of the
    expected list."""
    try:
        (value,) = _values(output)
    except (ValueError, RecursionError):
        return False
    only = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return _same_value(expected, value) or _same_value(only, value)


def _same_value(expected: Any, value: Any) -> bool:
    """Return whether a value equals its JSON: a tuple is a list, keys are strings, and decimals are
    rounded."""
    if isinstance(expected, list):
        is_list = isinstance(value, list | tuple) and len(value) == len(expected)
        return is_list and all(map(_same_value, expected, value))
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        named = {str(key): item for key, item in value.items()}
        return named.keys() == expected.keys() and all(_same_value(expected[key], named[key]) for key in expected)
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, **_TOLERANCE)
    return bool(value == expected)


def _values(output: str) -> list[Any]:
    """Return inside.py's values. Raises ValueError, since a program can write there too."""
    values = json.loads(output)
    if not isinstance(values, list):
        raise ValueError("no list of values")
    return [_decoded(value) for value in values]


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        kind, content = value
        if kind == "int":
            return int(content, 16)
        if kind == "dict":
            return {_decoded(key): _decoded(item) for key, item in content}
        kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[kind](_decoded(item) for item in content)
    except (TypeError, KeyError) as error:
        raise ValueError("no value") from error


# ------------------------------------------------------------------------------------------ asserts


def _assert_cases(text: str) -> list[Case]:
    cases = []
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assert):
            cases.append(_assert_case(statement.test))
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            # the sandbox has the usual modules
            raise ValueError(f"assert_case has more than asserts: {ast.unparse(statement)[:100]}")
    return cases


def _assert_case(test: ast.expr) -> Case:
    """Return the test of an assert: the program makes the calls, everything else is computed
    here."""
    calls = _Calls()
    rest = calls.visit(test)
    if not calls.expressions:
        raise ValueError(f"an assert calls nothing of the program: {ast.unparse(test)[:100]}")
    for node in ast.walk(rest):
        if not isinstance(node, _PARTS) or (isinstance(node, ast.Attribute) and not _is_of_math(node)):
            raise ValueError(
                f"an assert may only compare results of calls; this one does more: {ast.unparse(test)[:100]}"
            )
    code = compile(ast.fix_missing_locations(ast.Expression(rest)), "assert", "eval")
    return Case({"expressions": calls.expressions}, partial(_holds, code, len(calls.expressions)))


def _holds(code: Any, count: int, output: str) -> bool:
    try:
        values = _values(output)
        if len(values) != count:
            return False
        names = {f"_{index}": value for index, value in enumerate(values)}
        return bool(eval(code, {"__builtins__": {}, "math": math, **_PURE, **names}))
    except Exception:  # values that cannot be compared: in an assert a failure, too
        return False


def _is_of_math(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math"


class _Calls(ast.NodeTransformer):
    """Takes the outermost calls of the program's own functions out, and leaves names in their
    places."""

    def __init__(self) -> None:
        self.expressions: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:  # noqa: N802
        if _is_of_math(node.func) or (isinstance(node.func, ast.Name) and node.func.id in _PURE):
            node.args = [self.visit(argument) for argument in node.args]
            node.keywords = [self.visit(keyword) for keyword in node.keywords]
            return node
        if not isinstance(node.func, ast.Name) and not _is_method_of_solution(node.func):
            raise ValueError(f"an assert calls neither a function nor a method of Class(): {ast.unparse(node)[:100]}")
        self.expressions.append(ast.unparse(node))
        return ast.Name(f"_{len(self.expressions) - 1}", ast.Load())


def _is_method_of_solution(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Call):
        return False
    made = function.value
    return isinstance(made.func, ast.Name) and not made.args and not made.keywords
