"""The parts of the agents' examples that need no program of other people."""

import json

import pytest
from transformers import AutoTokenizer

from examples.agents.character_tools import calls, model_with_tools
from examples.agents.repairs import rows
from examples.calculator.pretrain import computed
from examples.calculator.problems import Product
from examples.character_model import EOS

pytestmark = pytest.mark.unit

TOOLS = [{"type": "function", "function": {"name": "A", "parameters": {}}}]


def test_the_chat_template_writes_what_the_model_was_trained_on(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(model_with_tools())
    problem = Product(12, 34)
    (_, call), (_, result), (_, answer) = computed(problem)
    text, [(name, arguments)] = calls(call, TOOLS)
    assert (text, name, arguments) == ("", "A", {"expression": "12*34"})
    messages = [
        {"role": "user", "content": problem.prompt},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        },
        {"role": "tool", "content": result.strip("=;")},
        {"role": "assistant", "content": answer},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert rendered == f"A{problem.prompt}{call}{EOS}{result}{answer}{EOS}"


@pytest.mark.parametrize("text", ["408", "", "(", "()", "((", "hm well"])
def test_a_text_without_a_whole_call_is_an_answer(text):
    assert calls(text, TOOLS) == (text, [])


def test_a_repair_shows_its_files_and_hides_tests():
    for row in rows():
        (message,) = row["prompt"]
        shown, *hidden = json.loads(row["reward_model"]["ground_truth"])["assert_case"]
        assert shown in message["content"] and hidden
        assert not any(line in message["content"] for line in hidden)
