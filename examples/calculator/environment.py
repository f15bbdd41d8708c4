"""A calculator as a tool: exact arithmetic on integers and fractions, of bounded size."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megatron_dapo.envs.tools import ToolEnvironment

MAX_CHARS = 200  # of an expression
MAX_BITS = 4096  # of a number on the way
_MAX_EXPONENT = 1000


class Calculator(ToolEnvironment):
    """One tool, `calculator(expression)`. The keyword arguments are those of ToolEnvironment."""

    def __init__(self, **format: str) -> None:
        super().__init__({"calculator": calculate}, **format)


def calculate(expression: str) -> str:
    """Return the value of an expression of + - * / // % ** and brackets.

    It is an integer, or a decimal of 12 significant digits. Raises ValueError for anything else,
    ZeroDivisionError, OverflowError for too large a number.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has more than {MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"an exponent is an integer of at most {_MAX_EXPONENT}")
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > MAX_BITS:
        raise OverflowError("the result is too large")
    return base**exponent.numerator


_BINARY: dict[type, Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            value = Fraction(_BINARY[type(operation)](_value(left), _value(right)))
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            value = _UNARY[type(operation)](_value(operand))
        case _:
            raise ValueError("only numbers, + - * / // % ** and brackets are understood")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverflowError("the result is too large")
    return value
