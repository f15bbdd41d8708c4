"""Looks at a model's chat template: the form of calls that it reads, and whether turns can be
appended."""

from typing import Any

from megatron_dapo.data.chat_template import Variables
from megatron_dapo.data.tokenizer import ASSISTANT, Tokenizer

_NAME, _KEY, _VALUE = "probe_tool", "probe_key", "probe-value"
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "probe", "parameters": _SCHEMA}}]
_ASKED = {"role": "user", "content": "asked"}


def arguments_are_text(tokenizer: Tokenizer, variables: Variables) -> bool | None:
    """Return whether the template shows a call's arguments right as JSON text, and not as an
    object; None if neither."""
    for is_text in (False, True):
        shown = _rendered(tokenizer, [_ASKED, _calling(is_text)], {**variables, "tools": _TOOLS})
        if _VALUE in shown and f"'{_KEY}'" not in shown:  # as Python shows a dictionary
            return is_text
    return None


def ids_are_short(tokenizer: Tokenizer, variables: Variables, is_text: bool) -> bool:
    """Return whether the template refuses a call's id in Kimi-K2's form, as Mistral's do.

    is_text: as `arguments_are_text`.
    """
    turn = _calling(is_text)
    turn["tool_calls"][0]["id"] = call_id(_NAME, 0)
    return not _rendered(tokenizer, [_ASKED, turn], {**variables, "tools": _TOOLS})


def call_id(name: str, number: int) -> str:
    """Return the id of a conversation's call in Kimi-K2's form, whose template shows no other name."""
    return f"functions.{name}:{number}"


def template_fault(tokenizer: Tokenizer, variables: Variables) -> str | None:
    """Return why appended turns would not be those of the chat template, None if they are.

    The text of tool results and of a user's message behind a turn must be the end of the template's
    text of a whole conversation, with only the turn's own end before it; results also behind
    earlier ones. They are not looked at if the template shows no tools, or no calls: requests with
    tools are refused then.
    """
    variables = {**variables, "tools": _TOOLS}
    is_text = arguments_are_text(tokenizer, variables)
    calling = _calling(bool(is_text))
    results = [
        {"role": "tool", "content": f"result {place}", "tool_call_id": calling["tool_calls"][0]["id"], "name": _NAME}
        for place in range(2)
    ]
    answering = {"role": ASSISTANT, "content": _VALUE}
    cases = [("a user's message", answering, [{"role": "user", "content": "more"}])]
    earlier: list[dict[str, Any]] = []
    if is_text is not None and _NAME in _rendered(tokenizer, [_ASKED], variables):
        cases.append(("tool results", calling, results))
        earlier = [calling, results[0]]
    for named, turn, rest in cases:
        if not _is_appended(tokenizer, [*earlier, turn], rest, variables):
            return (
                f"actor_rollout_ref.rollout.agent.history: the model's chat template shows {named} otherwise in a "
                f"whole conversation than behind a turn; set it to rendered, or use another template."
            )
    return None


def _is_appended(
    tokenizer: Tokenizer, turns: list[dict[str, Any]], rest: list[dict[str, Any]], variables: Variables
) -> bool:
    """Return whether messages behind the last of some turns are shown as `turn_text` shows them."""
    talk = [{"role": "user", "content": "first"}, {"role": ASSISTANT, "content": "earlier"}, _ASKED, *turns]
    system = {"role": "system", "content": "be brief"}
    if _rendered(tokenizer, [system, *talk], variables):
        talk.insert(0, system)
    whole = _rendered(tokenizer, [*talk, *rest], variables)
    alone = _rendered(tokenizer, talk, variables, add_generation_prompt=False)
    try:
        appended = tokenizer.turn_text(rest, variables, turns[-1].get("tool_calls", ()))
    except ValueError:
        return False
    end = whole.removesuffix(appended).rpartition(_VALUE)[2]
    return whole.endswith(appended) and alone.rpartition(_VALUE)[2].startswith(end)


def _rendered(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: Variables, add_generation_prompt: bool = True
) -> str:
    """Return the text of messages, "" if the template refuses them."""
    try:
        return tokenizer.render(messages, variables, add_generation_prompt)
    except ValueError:
        return ""


def _calling(is_text: bool) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": f'{{"{_KEY}": "{_VALUE}"}}' if is_text else {_KEY: _VALUE}}
    call = {"id": "a1b2c3d4e", "type": "function", "function": function}
    return {"role": ASSISTANT, "content": "", "tool_calls": [call]}
