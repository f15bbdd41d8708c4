"""SGLang's routes for parsers reply as the tests of an agent's answers take for granted."""

import asyncio
import json
from itertools import product
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from megatron_dapo.agents.conversation import AnswerText
from megatron_dapo.agents.parsing import AssistantMessage, parsed
from megatron_dapo.huggingface.model_families import FAMILIES
from tests.parser_replies import CALLS, THOUGHTS, TOOLS, WELL_FORMED

pytestmark = pytest.mark.e2e


def reply(server, route, fields):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    try:
        with urlopen(Request(server.url + route, json.dumps(fields).encode(), headers), timeout=60) as answer:
            return json.load(answer)
    except HTTPError as error:
        assert error.code >= 400
        return None


def test_calls_are_found_lost_and_refused_as_recorded(server):
    for (parser, text), expected in CALLS.items():
        got = reply(server, "/parse_function_call", {"text": text, "tools": TOOLS, "tool_call_parser": parser})
        calls = got and (got["normal_text"], [(call["name"], call["parameters"]) for call in got["calls"]])
        assert calls == expected, (parser, text)


def test_thoughts_are_separated_as_recorded(server):
    for (parser, text), expected in THOUGHTS.items():
        got = reply(server, "/separate_reasoning", {"text": text, "reasoning_parser": parser})
        assert (got["reasoning_text"], got["text"]) == expected, (parser, text)


def test_the_parsers_of_all_families_read_a_call_and_leave_other_text(server):
    async def parse(route, fields):
        if (got := reply(server, route, fields)) is None:
            raise ValueError("an error status")
        return got

    parsers = {(family.tool_parser, family.reasoning_parser) for family in FAMILIES.values() if family.tool_parser}
    assert len(parsers) >= 7
    for (tool_parser, reasoning_parser), ((name, text), calls) in product(parsers, WELL_FORMED.items()):
        if name == tool_parser:
            read = asyncio.run(parsed(AnswerText("", text, "", None), TOOLS, parse, tool_parser, reasoning_parser))
            assert (read.tool_calls, read.is_ill_formed) == (calls, False), (name, text)
    for tool_parser, reasoning_parser in parsers - {("gpt-oss", "gpt-oss")}:
        read = asyncio.run(parsed(AnswerText("", "Four.", "", None), TOOLS, parse, tool_parser, reasoning_parser))
        assert read == AssistantMessage("Four."), tool_parser
