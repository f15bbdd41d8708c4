"""Renders chat messages with a model's Jinja template, in the environment that templates are written for.

The names and settings (sandbox, trimmed blocks, `raise_exception`, `strftime_now`, `tojson`, break and continue, the
`generation` block) are those of transformers' chat templates; a test holds the rendering equal.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Render = Callable[..., str]
"""(messages, add_generation_prompt=True) -> text."""


def compile_template(source: str, special_tokens: Mapping[str, str]) -> Render:
    """Return a function (messages, add_generation_prompt) -> text, with it ready for the model's answer. Both raise
    jinja2.TemplateError.

    special_tokens: what the template knows as bos_token, eos_token ...
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    template = environment.from_string(source)

    def render(messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        own = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return template.render(messages=list(messages), **own, **special_tokens)

    return render


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for masks; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
