"""Looks at a model's chat template once: the form of calls, and whether turns can be appended."""

from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_dapo.data.chat_messages import Messages
from megatron_dapo.data.chat_template import NONE, Variables
from megatron_dapo.data.tokenizer import ASSISTANT, Tokenizer

_NAME, _KEY, _VALUE = "probe_tool", "probe_key", "probe-value"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "probe",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
        },
    }
]
_ASKED = {"role": "user", "content": "asked"}


@dataclass(frozen=True)
class TemplateForm:
    """The form of messages that a chat template reads."""

    shows_tools: bool = False
    shows_calls: bool = False
    shows_results: bool = False
    arguments_are_text: bool = False  # of calls; else objects
    are_ids_short: bool = False  # 9 letters and digits


def template_form(tokenizer: Tokenizer, variables: Variables = NONE) -> TemplateForm:
    """Return the form by renderings of a probe, the first one that shows the arguments as they are."""
    given = {**variables, "tools": _TOOLS}
    shows_tools = _NAME in _rendered(tokenizer, [_ASKED], given)
    for are_ids_short, arguments_are_text in product((False, True), repeat=2):
        turn = _turn(arguments_are_text, are_ids_short)
        (result,) = _results(turn, 1)
        shown = _rendered(tokenizer, [_ASKED, turn, result], given)
        # neither as a text within JSON, nor as Python shows a dictionary
        is_wrong = f'{_KEY}\\"' in shown or f"'{_KEY}'" in shown
        if _VALUE in shown and not is_wrong:
            return TemplateForm(shows_tools, True, result["content"] in shown, arguments_are_text, are_ids_short)
    (result,) = _results(_turn(), 1)
    plain = {"role": ASSISTANT, "content": _VALUE}
    return TemplateForm(shows_tools, False, result["content"] in _rendered(tokenizer, [_ASKED, plain, result], given))


def template_fault(tokenizer: Tokenizer, variables: Variables = NONE) -> str | None:
    """Return why appended turns would not be those of the chat template, None if they are.

    The text of tool results and of a user's message behind a turn, as `encode_turn` makes it, must
    be the end of the template's own text of the whole conversation, and only the turn's own end may
    stand between it and the turn's words.
    """
    form = template_form(tokenizer, variables)
    calling = _turn(form.arguments_are_text, form.are_ids_short)
    plain = {"role": ASSISTANT, "content": _VALUE}
    results = _results(calling, 2)
    given = {**variables, "tools": _TOOLS}
    for named, turn, rest, needed in (
        ("tool results", calling if form.shows_calls else plain, results, form.shows_results),
        ("a user's message", plain, [{"role": "user", "content": "more"}], True),
    ):
        if needed and _is_other(tokenizer, turn, rest, given):
            return f"the model's chat template shows {named} otherwise in a whole conversation than behind a turn"
    return None


def _is_other(tokenizer: Tokenizer, turn: dict[str, Any], rest: Messages, variables: Variables) -> bool:
    talk = [{"role": "user", "content": "first"}, {"role": ASSISTANT, "content": "earlier"}, _ASKED, turn]
    whole, ended = (_rendered(tokenizer, [*talk, *more], variables, bool(more)) for more in (rest, ()))
    try:
        try:
            appended = tokenizer.turn_text(rest, variables)
        except ValueError:
            appended = tokenizer.turn_text(rest, variables, turn.get("tool_calls", ()))
    except ValueError:
        return True
    if not whole.endswith(appended):
        return True
    _, _, closing = whole.removesuffix(appended).rpartition(_VALUE)
    return not ended.rpartition(_VALUE)[2].startswith(closing)


def _rendered(
    tokenizer: Tokenizer, messages: Messages, variables: Variables, add_generation_prompt: bool = True
) -> str:
    """Return the text of messages, "" if the template refuses them."""
    try:
        return tokenizer.render(messages, variables, add_generation_prompt)
    except ValueError:
        return ""


def _turn(arguments_are_text: bool = False, are_ids_short: bool = False) -> dict[str, Any]:
    arguments = f'{{"{_KEY}": "{_VALUE}"}}' if arguments_are_text else {_KEY: _VALUE}
    call = {"id": "a1b2c3d4e" if are_ids_short else "call_0_0", "type": "function"}
    return {
        "role": ASSISTANT,
        "content": "",
        "tool_calls": [call | {"function": {"name": _NAME, "arguments": arguments}}],
    }


def _results(turn: dict[str, Any], number: int) -> list[dict[str, Any]]:
    (call,) = turn["tool_calls"]
    return [
        {"role": "tool", "content": f"result {place}", "tool_call_id": call["id"], "name": _NAME}
        for place in range(number)
    ]
