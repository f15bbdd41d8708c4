"""Chat templates of model families behind an agent: prompts with tools, appended turns, refusals."""

import pytest

from megatron_dapo.agents.template_probe import arguments_are_text, template_fault
from tests.agent_templates import FAMILIES, source, tokenizer_with

pytestmark = pytest.mark.unit

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
RESULTS = [
    {"role": "tool", "content": "four", "tool_call_id": "aaaaaaaaa", "name": "add"},
    {"role": "tool", "content": "five", "tool_call_id": "bbbbbbbbb", "name": "add"},
]
MORE = [{"role": "user", "content": "And now?"}]
END = {
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "gptoss": "<|call|>",
    "glm4moe": "<|user|>",
    "glm 4": "<|user|>",
    "gemma 3": "<end_of_turn>",
}
SHOWS_NO_CALLS = ("deepseek_r1_distill", "gemma 3", "glm 4", "no results")

# the text between a model's turn with its end-of-turn token and the next turn, read off the templates
CHATML_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\nfour\n</tool_response>\n<tool_response>\nfive\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
CHATML_MORE = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
APPENDED = {
    "qwen2_5": (CHATML_RESULTS, CHATML_MORE),
    "qwen3": (CHATML_RESULTS, CHATML_MORE),
    "qwen3_instruct_2507": (CHATML_RESULTS, CHATML_MORE),
    "qwen3_5_think": (CHATML_RESULTS + "<think>\n", CHATML_MORE + "<think>\n"),
    "qwen3_6": (CHATML_RESULTS + "<think>\n", CHATML_MORE + "<think>\n"),
    "deepseekv3": (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>four<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>five<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "<｜User｜>And now?<｜Assistant｜><think>\n",
    ),
    "gptoss": (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"four"<|end|>'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"five"<|end|><|start|>assistant',
        "<|end|><|start|>user<|message|>And now?<|end|><|start|>assistant",
    ),
    "glm4moe": (
        "<|observation|>\n<tool_response>\nfour\n</tool_response>\n<tool_response>\nfive\n</tool_response><|assistant|>",
        "<|user|>\nAnd now?<|assistant|>",
    ),
    "kimi k2": (
        "<|im_system|>add<|im_middle|>## Return of aaaaaaaaa\nfour<|im_end|>"
        "<|im_system|>add<|im_middle|>## Return of bbbbbbbbb\nfive<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "<|im_user|>user<|im_middle|>And now?<|im_end|><|im_assistant|>assistant<|im_middle|>",
    ),
    "lfm2": (
        "\n<|im_start|>tool\n<|tool_response_start|>four<|tool_response_end|><|im_end|>"
        "\n<|im_start|>tool\n<|tool_response_start|>five<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n",
        CHATML_MORE,
    ),
    "nemotron 3": (
        CHATML_RESULTS.replace("</tool_response><|im_end|>", "</tool_response>\n<|im_end|>") + "<think>\n",
        CHATML_MORE + "<think>\n",
    ),
    "one call": (
        '<|im_start|>ipython\n"four"<|im_end|><|im_start|>ipython\n"five"<|im_end|><|im_start|>assistant\n',
        "<|im_start|>user\nAnd now?<|im_end|><|im_start|>assistant\n",
    ),
}


def calling(as_text, *numbers):
    calls = [
        {
            "id": name * 9,
            "type": "function",
            "function": {"name": "add", "arguments": f'{{"a": {number}}}' if as_text else {"a": number}},
        }
        for number, name in zip(numbers, "ab", strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {}

    def give(name):
        if name not in made:
            made[name] = tokenizer_with(tmp_path_factory.mktemp("model"), name, END.get(name, "<|im_end|>"))
        return made[name]

    return give


@pytest.mark.parametrize("name", APPENDED)
def test_two_results_and_a_users_message_are_appended_as_the_template_writes_them(tokenizers, name):
    tokenizer = tokenizers(name)
    end = None if name == "glm4moe" else tokenizer.eos_token_ids[-1]  # GLM's turns end with the next role
    calls = calling(name == "deepseekv3", 3)["tool_calls"]
    shown = [
        tokenizer.decode(tokenizer.encode_turn(rest, end, True, {"tools": TOOLS}, calls), skip_special_tokens=False)
        for rest in (RESULTS, MORE)
    ]
    assert tuple(shown) == APPENDED[name]


@pytest.mark.parametrize(
    "name, appended, refused",
    [
        ("gemma 3", "\n<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n", "roles must alternate"),
        ("glm 4", "<|user|>\nAnd now?<|assistant|>", "leaves out a message of role 'tool'"),
    ],
)
def test_a_template_without_results_is_appended_users_messages_alone(tokenizers, name, appended, refused):
    tokenizer = tokenizers(name)
    end = None if name == "glm 4" else tokenizer.eos_token_ids[-1]
    shown = tokenizer.encode_turn(MORE, end, True, {"tools": TOOLS})
    assert tokenizer.decode(shown, skip_special_tokens=False) == appended
    with pytest.raises(ValueError, match=refused):
        tokenizer.encode_turn(RESULTS, end, True, {"tools": TOOLS}, calling(False, 3)["tool_calls"])


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill", "glm 4"])
def test_a_system_prompt_that_the_template_shows_first_is_not_lost_behind_a_turn(tokenizers, name):
    late = [{"role": "system", "content": "late"}]
    assert "late" in tokenizers(name).full_text([*MORE, {"role": "assistant", "content": "x"}, *late])
    with pytest.raises(ValueError, match="leaves out a message of role 'system' behind a turn"):
        tokenizers(name).encode_turn(late, None, True)


@pytest.mark.parametrize("name", [*APPENDED, "chatml"])
def test_the_appended_text_ends_the_whole_conversation_of_transformers(tokenizers, name):
    from transformers.utils.chat_template_utils import render_jinja_template

    turn = calling(name == "deepseekv3", 3)
    talk = [{"role": "user", "content": "What is 2+2?"}, turn, *RESULTS]
    specials = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    texts, _ = render_jinja_template(
        [talk], tools=TOOLS, chat_template=source(name), add_generation_prompt=True, **specials
    )
    tokenizer = tokenizers(name)
    assert texts[0] == tokenizer.full_text(talk, {"tools": TOOLS})
    appended = tokenizer.encode_turn(RESULTS, None, True, {"tools": TOOLS}, turn["tool_calls"])
    assert texts[0].endswith(tokenizer.decode(appended, skip_special_tokens=False))


@pytest.mark.parametrize("name", sorted({*FAMILIES, *APPENDED, *SHOWS_NO_CALLS, "chatml"}))
def test_families_can_be_appended_to(tokenizers, name):
    assert template_fault(tokenizers(name), {}) is None


@pytest.mark.parametrize("name", ["tools last", "changing", "short talks"])
def test_a_template_that_moves_text_is_refused_at_the_start_in_one_sentence_with_the_cure(tokenizers, name):
    fault = template_fault(tokenizers(name), {})
    assert fault.startswith("actor_rollout_ref.rollout.agent.history: ")
    assert "a user's message" in fault and "set it to rendered" in fault and fault.endswith(".")


@pytest.mark.parametrize(
    "name, is_text",
    [(name, name == "deepseekv3") for name in APPENDED]
    + [(name, None) for name in SHOWS_NO_CALLS]
    + [("arguments as they are", True)],
)
def test_the_probe_finds_the_form_of_arguments(tokenizers, name, is_text):
    assert arguments_are_text(tokenizers(name), {}) is is_text


def test_a_template_that_begins_later_results_otherwise_is_refused_at_the_start(tokenizers):
    fault = template_fault(tokenizers("later results"), {})
    assert "tool results" in fault and "set it to rendered" in fault


def test_variables_of_the_template_reach_prompts_and_appended_turns(tokenizers):
    tokenizer = tokenizers("qwen3")
    quick = {"enable_thinking": False}
    assert tokenizer.render(MORE, quick).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    turn = tokenizer.decode(tokenizer.encode_turn(MORE, None, True, quick), skip_special_tokens=False)
    assert turn.endswith("<think>\n\n</think>\n\n")
    assert '"name": "add"' in tokenizer.render(MORE, {"tools": TOOLS})


def test_a_message_that_the_template_leaves_out_is_an_error_wherever_its_text_stands_too(tokenizers):
    tokenizer = tokenizers("no results")
    with pytest.raises(ValueError, match="leaves out a message of role 'tool'"):
        tokenizer.encode_turn(RESULTS, None, True)
    echo = [{"role": "user", "content": "four five"}, {"role": "assistant", "content": "x"}, *RESULTS]
    with pytest.raises(ValueError, match="leaves out a message of role 'tool'"):
        tokenizer.full_text(echo)
    late = [*MORE, {"role": "assistant", "content": "x"}, {"role": "system", "content": "late"}]
    with pytest.raises(ValueError, match="leaves out a message of role 'system'"):
        tokenizers("gptoss").encode_turn(late[2:], None, True)


def test_results_of_a_template_that_needs_calls_are_refused_without_them(tokenizers):
    with pytest.raises(ValueError, match="no previous assistant message with a tool call"):
        tokenizers("gptoss").encode_turn(RESULTS, None, True)


def test_a_turn_that_ends_with_the_next_role_is_not_given_that_role_twice(tokenizers):
    tokenizer = tokenizers("glm4moe")
    appended = tokenizer.encode_turn(MORE, tokenizer.eos_token_ids[-1], True)
    assert tokenizer.decode(appended, skip_special_tokens=False) == "\nAnd now?<|assistant|>"
