"""Reads calls of tools and thoughts in a model's answer, with the parsers of an SGLang server."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.agents.prompt_writer import AnswerText
from megatron_dapo.common.import_path import import_attribute

Parse = Callable[[str, dict], Awaitable[Any]]
"""(route, JSON fields) -> a server's JSON. Raises ValueError for an error status."""
Parser = str | Callable | None
"""SGLang's name, or a function: (text, tools) -> (other text, [(name, arguments), ...]) for calls,
text -> (thoughts, other text) for thoughts. It raises for an ill-formed text."""

# SGLang's parser -> the marks of a call; a malformed call is lost, or a half one is taken for whole
_MARKS = {
    "qwen25": ("<tool_call>", "</tool_call>"),
    "qwen": ("<tool_call>", "</tool_call>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>"),
    "glm47": ("<tool_call>", "</tool_call>"),
    "deepseekv3": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "deepseekv31": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>",),
    "gpt-oss": (" to=functions.",),
}
_UNMARKED = "llama3"  # it reads a bare JSON object, too
_HARMONY = "gpt-oss"  # its parsers read the beginning and the end of a turn, too


@dataclass(frozen=True)
class AssistantMessage:
    """An answer as the client is shown it."""

    content: str
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    is_ill_formed: bool = False  # a call was lost: the content is the raw text

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if not self.tool_calls:
            message["content"] = self.content
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


def load_parser(key: str, name: str | None) -> Parser:
    """Return SGLang's name of a parser, or the function of an import path. Raises UserError."""
    if name is None or ":" not in name:
        return name
    return import_attribute(key, name, "package.module:function")


async def parsed(
    text: AnswerText,
    tools: Sequence[dict[str, Any]] | None,
    parse: Parse,
    tool_parser: Parser,
    reasoning_parser: Parser,
    node: int,
) -> AssistantMessage:
    """Return the message of an answer.

    A text that a parser refuses, or loses a call of, stays whole and is ill-formed. Errors of
    `parse` other than ValueError are passed on.

    Args:
        text: the answer's.
        tools: those of the request; without any no call is read.
        parse: asks a server.
        tool_parser: reads calls; None: no call is read.
        reasoning_parser: reads thoughts; None: they stay in the content.
        node: the answer's number, in the ids of its calls.
    """
    reads_calls = bool(tools) and tool_parser is not None
    if not reads_calls and reasoning_parser is None:
        return AssistantMessage(text.words)
    is_harmony = _HARMONY in (tool_parser, reasoning_parser)
    start = "<|start|>assistant" if is_harmony else "<think>"
    is_open = text.opening.rstrip().endswith(start) and (is_harmony or reasoning_parser is not None)
    whole = (start if is_open else "") + text.words + (text.end if is_harmony else "")
    reasoning, rest = "", whole
    try:
        if reasoning_parser is not None:
            reasoning, rest = await _thoughts(whole, parse, reasoning_parser)
        if not reads_calls:
            return AssistantMessage(rest, reasoning)
        content, calls = await _calls(rest, tools, parse, tool_parser)
        _check_calls(whole, reasoning, calls, tool_parser)
        if not calls and content != rest:
            raise ValueError("text was lost")
    except ValueError:
        if is_harmony:  # its parser of thoughts loses calls
            reasoning, rest = "", text.words
        return AssistantMessage(rest, reasoning, is_ill_formed=True)
    numbered = [
        {"id": f"call_{node}_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    return AssistantMessage(content, reasoning, numbered)


async def _thoughts(text: str, parse: Parse, parser: Parser) -> tuple[str, str]:
    """Return (thoughts, the other text)."""
    if isinstance(parser, str):
        reply = await parse("/separate_reasoning", {"text": text, "reasoning_parser": parser})
        thoughts, rest = _field(reply, "reasoning_text") or "", _field(reply, "text") or ""
    else:
        thoughts, rest = _by_function(parser, text)
    if not (isinstance(thoughts, str) and isinstance(rest, str)):
        raise ValueError("thoughts and the other text must be texts")
    return thoughts, rest


async def _calls(text: str, tools: Any, parse: Parse, parser: Parser) -> tuple[str, list[tuple[str, str]]]:
    """Return (the other text, [(name, arguments as JSON text)])."""
    if isinstance(parser, str):
        if parser != _UNMARKED and parser in _MARKS and not any(mark in text for mark in _MARKS[parser]):
            return text, []
        fields = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        reply = await parse("/parse_function_call", fields)
        rest = _field(reply, "normal_text") or ""
        found = [(_field(call, "name"), _field(call, "parameters")) for call in _field(reply, "calls") or ()]
    else:
        rest, found = _by_function(parser, text, tools)
    calls = [(name, text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)) for name, text in found]
    if not isinstance(rest, str) or not all(isinstance(name, str) for name, _ in calls):
        raise ValueError("a call must have a name")
    return rest, calls


def _check_calls(whole: str, reasoning: str, calls: list[tuple[str, str]], parser: Parser) -> None:
    """Raise ValueError if there are fewer calls than marks of calls, or half a call."""
    # a thought may mention a mark, and so may an argument
    named = reasoning + "".join(arguments for _, arguments in calls)
    marks = _MARKS.get(parser, ()) if isinstance(parser, str) else ()
    counts = [whole.count(mark) - named.count(mark) for mark in marks]
    if counts and (max(counts) > len(calls) or min(counts) < max(counts)):
        raise ValueError("a call was lost")


def _field(reply: Any, name: str) -> Any:
    if not isinstance(reply, dict):
        raise ValueError("a parser's reply must be an object")
    return reply.get(name)


def _by_function(function: Any, *arguments: Any) -> tuple[Any, Any]:
    """Return the pair of a user's parser. Raises ValueError for all its errors."""
    try:
        first, second = function(*arguments)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return first, second
