"""Tools and text games as environments: their answers, and their creation by name."""

import asyncio

import pytest

from examples.calculator.environment import Calculator, calculate
from megatron_dapo.common.errors import UserError
from megatron_dapo.envs.environment import Observation, Task
from megatron_dapo.envs.environment_registry import check_environment, make
from megatron_dapo.envs.text_game import command_of

pytestmark = pytest.mark.unit


def play(environment, task, *responses):
    """The observations to reset and to each response."""

    async def scenario():
        seen = [await environment.reset(task)]
        for response in responses:
            seen.append(await environment.step(response))
        await environment.close()
        return seen

    return asyncio.run(scenario())


CALCULATOR = "examples.calculator.environment:Calculator"
TASK = Task("12*34?", "calculator", "408")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" -(2 + 3) * 4 ", "-20"),
        ("7//2 + 7%4", "6"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),  # exact, not binary
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("10**20/10**19", "10"),
    ],
)
def test_the_calculator_computes_exactly(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "2+", "9**9**9", "__import__('os')", "a+1", "1 if 1 else 2", "(1).real", "'a'*9", "2**0.5", "9" * 201, "True"],
)
def test_the_calculator_refuses_everything_else_at_once(expression):
    with pytest.raises((ValueError, ArithmeticError)):
        calculate(expression)


def test_a_tool_call_is_answered_and_a_turn_without_one_ends_the_trajectory():
    call = 'Let me see. <tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>'
    _, answered, ended = play(Calculator(), TASK, call, "It is 408.")
    assert answered == Observation(({"role": "tool", "content": "408"},))
    assert ended == Observation(done=True)


def test_calls_can_be_written_in_other_marks_and_words():
    environment = Calculator(call_open="(", call_close=")", result="={};", role="user")
    _, answered = play(environment, TASK, "(12*34) (1+1")
    assert [message["content"] for message in answered.messages] == ["=408;", "=2;"]
    assert {message["role"] for message in answered.messages} == {"user"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"name": "search", "arguments": {}}', "no tool 'search'; there is calculator"),
        ('{"name": "calculator", "arguments": {"query": "1"}}', "query"),
        ('{"name": "calculator", "arguments": 3}', "JSON object"),
        ('{"name": ', "Expecting value"),
        ("1/0", "zero"),
        ("x", "only numbers"),
    ],
)
def test_the_model_reads_the_fault_of_a_bad_call(call, words):
    _, answered = play(Calculator(), TASK, f"<tool_call>{call}</tool_call>")
    (message,) = answered.messages
    assert message["content"].startswith("error: ") and words in message["content"]


@pytest.mark.parametrize(
    ("response", "command"),
    [
        ("<action>go to shelf 1</action>", "go to shelf 1"),
        ("first <action>look</action>, no: <action> go to shelf 1\n</action>", "go to shelf 1"),
        ("I will look.\n> go to shelf 1\n\n", "go to shelf 1"),
        ("", ""),
    ],
)
def test_the_last_action_of_a_turn_is_taken(response, command):
    assert command_of(response) == command


def test_an_unknown_environment_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="Did you mean 'reasoning_gym'"):
        check_environment("reasoning_gim")


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("no_such_package:Thing", {}, "cannot import 'no_such_package:Thing'"),
        (CALCULATOR, {"marker": "x"}, f"{CALCULATOR} cannot be made with environment_kwargs {{'marker': 'x'}}"),
        (CALCULATOR, {"call_open": ""}, "call_open and call_close need text"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(name, kwargs, words):
    with pytest.raises(UserError, match="multi_turn.environment") as caught:
        make(name, kwargs)
    assert words in str(caught.value)
