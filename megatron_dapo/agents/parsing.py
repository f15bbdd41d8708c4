"""Reads calls of tools and thoughts in a model's answer, with the parsers of an SGLang server."""

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.agents.call_marks import CALL_MARKS
from megatron_dapo.agents.conversation import AnswerText
from megatron_dapo.common.import_path import import_attribute

Parse = Callable[[str, dict], Awaitable[Any]]
"""(route, JSON fields) -> a server's JSON. Raises ValueError for an error status."""
Parser = str | Callable | None
"""SGLang's name, or a function: (text, tools) -> (other text, [(name, arguments), ...]) for calls,
text -> (thoughts, other text) for thoughts. It raises for an ill-formed text."""

# SGLang 0.5.23's route fails for glm47; glm45 reads its calls with a newline behind the name
_GLM47_NAME = re.compile(r"(<tool_call>[^<\n]+)(?=<)")
_UNMARKED = "llama3"  # it reads a bare JSON object, too
_HARMONY = "gpt-oss"  # its parsers read the beginning and the end of a turn, too


@dataclass(frozen=True)
class AssistantMessage:
    """An answer as the client is shown it."""

    content: str
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments as JSON text)
    is_ill_formed: bool = False  # a call was lost: the content has it as text


def load_parser(key: str, name: str | None) -> Parser:
    """Return the function of an import path, or SGLang's name as it is. Raises UserError."""
    return import_attribute(key, name, "package.module:function") if name and ":" in name else name


async def parsed(
    text: AnswerText, tools: Sequence[dict] | None, parse: Parse, tool_parser: Parser, reasoning_parser: Parser
) -> AssistantMessage:
    """Return the message of an answer.

    A text that a parser refuses, or loses a call of, is ill-formed. Errors of `parse` other than
    ValueError are passed on.

    Args:
        text: the answer's.
        tools: those of the request; without any no call is read.
        parse: asks a server.
        tool_parser: reads calls; None: no call is read.
        reasoning_parser: reads thoughts; None: they stay in the content.
    """
    reads_calls = bool(tools) and tool_parser is not None
    if not reads_calls and reasoning_parser is None:
        return AssistantMessage(text.words)
    is_harmony = _HARMONY in (tool_parser, reasoning_parser)
    start = "<|start|>assistant" if is_harmony else "<think>"
    is_open = text.opening.rstrip().endswith(start) and (is_harmony or reasoning_parser is not None)
    whole = (start if is_open else "") + text.words + (text.end if is_harmony else "")
    reasoning, rest = "", text.words
    try:
        if reasoning_parser is not None:
            reasoning, rest = await _thoughts(whole, parse, reasoning_parser)
        elif is_harmony:
            rest = whole
        if not reads_calls:
            return AssistantMessage(rest, reasoning)
        content, calls = await _calls(rest, tools, parse, tool_parser)
        _check(whole, reasoning, rest, content, calls, tool_parser)
    except (ValueError, TypeError):  # the latter for another result of a user's parser
        # the parser of harmony's thoughts loses calls
        return AssistantMessage(text.words if is_harmony else rest, "" if is_harmony else reasoning, [], True)
    return AssistantMessage(content, reasoning, calls)


async def _thoughts(text: str, parse: Parse, parser: Parser) -> tuple[str, str]:
    """Return (thoughts, the other text)."""
    if isinstance(parser, str):
        reply = await parse("/separate_reasoning", {"text": text, "reasoning_parser": parser})
        return reply["reasoning_text"] or "", reply["text"] or ""
    thoughts, rest = _called(parser, text)
    return str(thoughts), str(rest)


async def _calls(text: str, tools: Any, parse: Parse, parser: Parser) -> tuple[str, list[tuple[str, str]]]:
    """Return (the other text, [(name, arguments as JSON text)])."""
    if not isinstance(parser, str):
        rest, calls = _called(parser, text, tools)
        return str(rest), [(str(name), words if isinstance(words, str) else json.dumps(words)) for name, words in calls]
    if parser != _UNMARKED and parser in CALL_MARKS and not any(mark in text for mark in CALL_MARKS[parser]):
        return text, []
    if parser == "glm47":
        parser, text = "glm45", _GLM47_NAME.sub(r"\1\n", text)
    fields = {"text": text, "tools": tools, "tool_call_parser": parser}
    reply = await parse("/parse_function_call", fields)
    # `tool_index` is the tool's place, not the call's
    return reply["normal_text"] or "", [(call["name"], call["parameters"]) for call in reply["calls"]]


def _check(whole: str, reasoning: str, rest: str, content: str, calls: list[tuple[str, str]], parser: Parser) -> None:
    """Raise ValueError if there are fewer calls than marks of calls, half a call, or text is lost."""
    # a thought may mention a mark, and so may an argument
    mentions = reasoning + "".join(arguments for _, arguments in calls)
    marks = CALL_MARKS.get(parser, ()) if isinstance(parser, str) else ()
    counts = [whole.count(mark) - mentions.count(mark) for mark in marks] or [0]
    if max(counts) > len(calls) or min(counts) < max(counts) or not calls and content != rest:
        raise ValueError("a call was lost")


def _called(function: Any, *arguments: Any) -> Any:
    """Return the result of a user's parser. Raises ValueError for all its errors."""
    try:
        return function(*arguments)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
