"""Jinja's sandbox for chat templates, with a bound on the work and the text of one rendering.

Jinja's sandbox keeps a template from the machine, and a range from more than 100 000 numbers. It
does not keep two such loops from running for hours, or a text from doubling until the memory is
full.

Here turns of loops, calls and operators cost steps, and so do texts: read ones, by slices and
comparisons too, and new ones. A text is refused before it gets too long.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # of one rendering; a conversation of 1000 messages takes some 10 000
MAX_TEXT = 8_000_000  # characters
_TEXT_PER_STEP = 1000  # characters of read texts
_MADE_PER_STEP = 250  # characters of new texts, which may all be kept
_MAX_BITS = 4096  # of an integer
_MAX_NUMBER = 10**6  # as an argument: a width, an indent, a count
_MAX_FORMAT = 10_000  # characters
# in a format: a width to be refused
_WIDE = re.compile(r"\{[^{}]*:[^{}]*(\d{7,}|\{)|%[-+ #0]*\d*\.?(\d{7,}|\*)")
_FORMATS = ("format", "format_map")
_TURNS, _JOINED, _READ = "_turns", "_joined", "_read"
_Sequence = str | list | tuple


class TooMuchWork(jinja2.TemplateRuntimeError):
    """The rendering takes more steps, or makes a longer text, than any conversation needs."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders within MAX_STEPS and MAX_TEXT, one text at a time."""

    intercepted_binops = frozenset(
        ("+", "-", "*", "/", "//", "**", "%")
    )  # Jinja would else compute them when it compiles, too

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_left = 0
        self.filters = {name: self.bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {_TURNS: self._turns, _JOINED: self.concat, _READ: self._read}

    @contextmanager
    def one_rendering(self) -> Iterator[None]:
        """Count the steps inside. Raises jinja2.TemplateError for every failure there."""
        self._num_left = MAX_STEPS
        try:
            yield
        except jinja2.TemplateError:
            raise
        except Exception as error:  # a wrong type, a division by 0, too deep a recursion
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._num_left = 0

    def bounded(self, name: str, function: Callable) -> Callable:
        """Return a filter of this name that takes steps."""

        def step_by_step(*args: Any, **kwargs: Any) -> Any:
            self._charge(name, (*args, *kwargs.values()))
            return self._checked(function(*args, **kwargs))

        # whether it takes the context
        step_by_step.__dict__.update(getattr(function, "__dict__", {}))
        return step_by_step

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for a template."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        self._charge(name, (owner, *args, *kwargs.values()))
        return self._checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator for a template."""
        self._charge("format" if operator == "%" else operator, (left, right))
        if operator == "**" and not (_is_number(left, _MAX_NUMBER) and _is_number(right, 64)):
            raise TooMuchWork("a power is too large")
        if operator == "*":
            _check_product(left, right)
        return self._checked(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counted().visit(super()._parse(source, name, filename))

    def _step(self, number: int = 1) -> None:
        self._num_left -= number
        if self._num_left < 0:
            raise TooMuchWork(f"it takes more than {MAX_STEPS} steps")

    def _turns(self, values: Iterable) -> Iterator:
        for value in values:
            self._step()
            yield value

    def _read(self, value: Any) -> Any:
        """Take the steps of a slice, a comparison or a test of this value."""
        if isinstance(value, _Sequence):
            self._step(len(value) // _TEXT_PER_STEP)
        return value

    def concat(self, parts: Iterable) -> str:
        """Join the texts of a template, a macro or a block."""
        texts, size = [], 0
        for part in map(str, parts):
            texts.append(part)
            size += len(part)
            if size > MAX_TEXT:
                raise TooMuchWork(f"the text gets longer than {MAX_TEXT} characters")
        self._step(size // _MADE_PER_STEP)
        return "".join(texts)

    def _charge(self, name: str, values: tuple) -> None:
        """Take the steps of a call with these values; the first one is the text it is called on.

        Raise TooMuchWork, too, if it may make a longer text than MAX_TEXT.
        """
        sizes = [len(value) for value in values if isinstance(value, list | tuple | dict | range)]
        texts = [value for value in values if isinstance(value, str)]
        self._step(1 + sum(sizes) + sum(map(len, texts)) // _TEXT_PER_STEP)
        if name in _FORMATS:
            if texts and (len(texts[0]) > _MAX_FORMAT or _WIDE.search(texts[0])):
                raise TooMuchWork("a format is too wide")
        elif name not in self.intercepted_binops and any(
            type(value) is int and abs(value) > _MAX_NUMBER for value in values[1:]
        ):
            raise TooMuchWork(f"{name} is called with a number above {_MAX_NUMBER}")
        if name == "replace" and len(texts) >= 3:
            _check_product(texts[0].count(texts[1]), texts[2])
        if name in ("join", "expandtabs", "indent"):
            numbers = [value for value in values if type(value) is int]
            parts = [*sizes, *(len(text) for text in texts), *numbers]
            _check_product(parts[0] if parts else 0, "x" * min(max(parts[1:], default=0), MAX_TEXT))

    def _checked(self, value: Any) -> Any:
        if isinstance(value, _Sequence) and len(value) > MAX_TEXT:
            raise TooMuchWork(f"a text gets longer than {MAX_TEXT} characters")
        if isinstance(value, _Sequence):
            self._step(len(value) // _MADE_PER_STEP)
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise TooMuchWork("a number is too large")
        return value


def _is_number(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and abs(value) <= most


def _check_product(left: Any, right: Any) -> None:
    """Raise TooMuchWork for a long repetition, and for a number beyond all use."""
    is_text = isinstance(left, _Sequence) or isinstance(right, _Sequence)
    sizes = [len(value) if isinstance(value, _Sequence) else value for value in (left, right)]
    if all(isinstance(size, int | float) for size in sizes) and abs(sizes[0] * sizes[1]) > (
        MAX_TEXT if is_text else 10**100
    ):
        raise TooMuchWork("a product is too large")


class _Counted(NodeTransformer):
    """Sends loops, joined texts and compared, tested or sliced values through counting filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _TURNS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _READ)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _READ)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:
        self.generic_visit(node)
        node.node = _filtered(node.node, _READ)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, _READ)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
