"""A parser of calls for models with random weights: every other text is a call or two."""

import zlib
from typing import Any


def calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, dict[str, str]]]]:
    """Return (the text beside calls, the calls): a text's checksum decides about it."""
    number = (0, 0, 1, 2)[zlib.crc32(text.encode(errors="replace")) % 4]
    function = tools[0]["function"]
    names = function["parameters"]["properties"]
    read = [(function["name"], {name: f"{place} {text}" for name in names}) for place in range(number)]
    return ("", read) if read else (text, [])
