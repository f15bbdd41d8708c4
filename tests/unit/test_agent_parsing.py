"""An agent's answers: calls and thoughts found, none lost without a count."""

import asyncio

import pytest

from megatron_dapo.agents.conversation import AnswerText
from megatron_dapo.agents.parsing import AssistantMessage, load_parser, parsed
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.model_families import FAMILIES
from tests.parser_replies import ADD, CALLS, ILL_FORMED, THOUGHTS, TOOLS, WELL_FORMED

pytestmark = pytest.mark.unit

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Server:
    """Replies as SGLang does, from its records; keeps the requests."""

    def __init__(self):
        self.asked = []

    async def __call__(self, route, fields):
        self.asked.append((route, fields["text"]))
        if route == "/separate_reasoning":
            thoughts, rest = THOUGHTS[fields["reasoning_parser"], fields["text"]]
            return {"reasoning_text": thoughts, "text": rest}
        assert route == "/parse_function_call" and fields["tools"] == TOOLS
        if (reply := CALLS[fields["tool_call_parser"], fields["text"]]) is None:
            raise ValueError("status 500")
        calls = [{"tool_index": 0, "name": name, "parameters": words} for name, words in reply[1]]
        return {"normal_text": reply[0], "calls": calls}


def read(text, tool_parser=None, reasoning_parser=None, tools=TOOLS, opening="", end="", server=None):
    answer = AnswerText(opening, text, end, None)
    return asyncio.run(parsed(answer, tools, server or Server(), tool_parser, reasoning_parser))


def split(name, text):
    """The end of a turn of harmony is a token, and no word."""
    end = next((end for end in ("<|call|>", "<|return|>") if name == "gpt-oss" and text.endswith(end)), "")
    return text.removesuffix(end), end


@pytest.mark.parametrize("case", WELL_FORMED, ids=str)
def test_calls_are_read_in_the_form_of_each_family(case):
    text, end = split(*case)
    message = read(text, case[0], end=end)
    assert message.tool_calls == WELL_FORMED[case] and not message.is_ill_formed


@pytest.mark.parametrize("case", ILL_FORMED, ids=str)
def test_an_answer_whose_call_gets_lost_stays_whole_and_is_counted(case):
    text, end = split(*case)
    assert read(text, case[0], end=end) == AssistantMessage(text, is_ill_formed=True)


def test_every_familys_parser_has_a_recorded_call():
    assert {family.tool_parser for family in FAMILIES.values()} - {None} == {name for name, _ in WELL_FORMED}


def test_without_tools_or_parsers_no_server_is_asked():
    server = Server()
    assert read(CALL, "qwen25", tools=None, server=server) == AssistantMessage(CALL)
    assert read(CALL, server=server) == AssistantMessage(CALL)
    assert read("Four.", "qwen25", server=server) == AssistantMessage("Four."), "it has no mark of a call"
    assert not server.asked


def test_thoughts_are_told_apart_also_if_the_prompt_began_them():
    assert read("<think>\nhm\n</think>\n\n4", None, "qwen3") == AssistantMessage("\n\n4", "\nhm\n")
    opened = read("hm\n</think>\n\n4", None, "qwen3", opening="<|im_start|>assistant\n<think>\n")
    assert opened == AssistantMessage("\n\n4", "hm\n")
    closed = read("4", None, "qwen3", opening="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert closed == AssistantMessage("4")
    assert read("4", None, None, opening="<think>\n") == AssistantMessage("4")


def test_harmonys_answer_is_read_from_the_beginning_of_its_turn_to_its_end():
    opening = "<|end|><|start|>assistant"
    both = "gpt-oss", "gpt-oss"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert read("<|channel|>final<|message|>4", *both, opening=opening, end="<|return|>") == AssistantMessage("4")
    final = read(thought + "<|channel|>final<|message|>4", *both, opening=opening, end="<|return|>")
    assert final == AssistantMessage("4", "hm")
    call = thought + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    assert read(call, *both, opening=opening, end="<|call|>") == AssistantMessage("", "hm", [ADD])
    assert read(call, *both, opening=opening) == AssistantMessage(call, is_ill_formed=True), "it was cut"


def thinks_of_calls(text):
    thoughts, _, rest = text.partition("</think>")
    return thoughts, rest


def test_a_mark_in_a_thought_or_in_an_argument_is_no_lost_call():
    def calls(text, tools):
        return "", [("add", {"a": "</tool_call>"})]

    text = "I write <tool_call>.</think>" + CALL
    message = read(text, "qwen25", thinks_of_calls, server=Server())
    assert (message.tool_calls, message.is_ill_formed) == ([ADD], False)
    assert read(text, calls, thinks_of_calls).tool_calls == [("add", '{"a": "</tool_call>"}')]


@pytest.mark.parametrize(
    "parser",
    [
        lambda text, tools: 1 / 0,
        lambda text, tools: None,
        lambda text, tools: ("", [("add",)]),
        lambda text, tools: ("", [("add", {1, 2})]),
        lambda text: ("", []),
    ],
)
def test_an_own_parser_that_fails_costs_its_answer_alone(parser):
    assert read("Four.", parser) == AssistantMessage("Four.", is_ill_formed=True)


def test_an_own_parser_of_thoughts_that_fails_costs_its_answer_alone():
    message = read("Four.", None, lambda text: text, opening="<think>\n")
    assert message == AssistantMessage("Four.", is_ill_formed=True)


def test_a_lost_server_is_not_the_answers_fault():
    async def lost(route, fields):
        raise RuntimeError("no server")

    with pytest.raises(RuntimeError, match="no server"):
        read(CALL, "qwen25", server=lost)


def test_a_parser_is_a_name_or_an_import_path():
    key = "actor_rollout_ref.rollout.agent.tool_parser"
    assert load_parser(key, "qwen25") == "qwen25" and load_parser(key, None) is None
    assert load_parser(key, "tests.unit.test_agent_parsing:thinks_of_calls").__name__ == "thinks_of_calls"
    with pytest.raises(UserError, match="tool_parser: cannot import 'no.such:parser'"):
        load_parser(key, "no.such:parser")
