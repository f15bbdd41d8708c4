"""Tools for the calculator example's model, which knows 61 characters: its chat template and parser.

A call is "(12*34)", its result "=408;", as in the texts that the model was trained on. The names of
the tools stand before the question: "A12*34?".
"""

import re
import shutil
from pathlib import Path
from typing import Any

from examples.cache import cache_folder
from examples.calculator.pretrain import BASE
from examples.character_model import EOS

TEMPLATE = (
    "{%- for tool in tools or [] -%}{{ tool.function.name }}{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- for call in message.tool_calls or [] -%}"
    "({{ call.function.arguments.values() | join(',') }})"
    "{%- endfor -%}"
    "{{ message.content or '' }}" + EOS + "{%- elif message.role == 'tool' -%}"
    "={{ message.content }};"
    "{%- else -%}{{ message.content }}{%- endif -%}"
    "{%- endfor -%}"
)
_CALL = re.compile(r"\(([^()]+)\)")


def calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, dict[str, str]]]]:
    """Return the text beside calls, and the calls as (name, arguments): each is of the first tool."""
    name = tools[0]["function"]["name"]
    return _CALL.sub("", text), [(name, {"expression": expression}) for expression in _CALL.findall(text)]


def model_with_tools() -> Path:
    """Make the folder of the calculator example's base model with the chat template; return it."""
    folder = cache_folder() / "agents_demo_model"
    shutil.copytree(BASE, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
