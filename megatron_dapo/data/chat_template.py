"""Renders chat messages with a model's Jinja template, bounded in work and text.

The names and settings are those of transformers' chat templates: sandbox, trimmed blocks,
`raise_exception`, `strftime_now`, `tojson`, break and continue, the `generation` block. A test
holds the rendering equal.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jinja2
from jinja2.ext import Extension, loopcontrols

from megatron_dapo.data.template_limits import BoundedEnvironment

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# around the text of a `generation` block, cut out again later; nobody's text holds them
_BEGIN, _END = (f"\ufdd0{secrets.token_hex(8)}\ufdd1" for _ in range(2))

Variables: TypeAlias = Mapping[str, Any]
"""Names of a template and their values, such as `tools`."""
NONE: Variables = MappingProxyType({})


class TextPart(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_learned: bool  # the assistant wrote it


class ChatTemplate:
    """A compiled template.

    All methods raise jinja2.TemplateError for refused messages, and after too much work.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile. special_tokens: the template's bos_token, eos_token ..."""
        self._special_tokens = dict(special_tokens)
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = environment.bounded("tojson", _to_json)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._environment = environment
        self._template = environment.from_string(source)
        self.has_generation_blocks = _GENERATION.search(source) is not None

    def parts(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, variables: Variables = NONE
    ) -> list[TextPart]:
        """Return the text of messages, cut at both ends of `generation` blocks; with
        add_generation_prompt ready for the model's answer."""
        others = {"tools": None, "documents": None, **self._special_tokens, **variables}
        own = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        with self._environment.one_rendering():
            return list(_cut(self._template.render(others | own)))


def _cut(marked: str) -> Iterator[TextPart]:
    before, *blocks = marked.split(_BEGIN)
    yield TextPart(before, False)
    for block in blocks:
        learned, _, after = block.partition(_END)
        yield TextPart(learned, True)
        yield TextPart(after, False)


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], content).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
