"""The assistant's tokens in a conversation: transformers' masks,
or one sentence about the obstacle."""

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.tokenizer import load_tokenizer
from tests.model_folders import write_byte_level

pytestmark = pytest.mark.unit

# as Qwen2.5 and others write it, with transformers' marks; the end of the turn is the assistant's,
# the newline is not
MARKED = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# as Qwen3: thoughts of earlier answers are left out, and a last answer without any gets empty ones
THINKING = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

CONVERSATIONS = {
    "one turn": [("user", "What is 2+3?"), ("assistant", "The answer is 5.")],
    "system and several turns": [
        ("system", "Be brief é\n"),
        ("user", " 12345 "),
        ("assistant", "def f(x):\n    return x ** 2\n"),
        ("user", "why?"),
        ("assistant", " naïve <|im_end|> café "),
        ("user", "and last?"),
    ],
    "two answers in a row": [("user", "a"), ("assistant", "b"), ("assistant", "")],
    "tools": [("user", "2+3"), ("assistant", "add(2,3)"), ("tool", "5"), ("tool", "6"), ("assistant", "5")],
}


def messages_of(name: str) -> list[dict]:
    return [{"role": role, "content": content} for role, content in CONVERSATIONS[name]]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "by prefixes"])
def test_tokens_and_mask_of_a_conversation_are_those_of_transformers(template, name, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = write_byte_level(tmp_path_factory.mktemp("model"), "Qwen2Tokenizer", template)
    expected = AutoTokenizer.from_pretrained(folder, local_files_only=True).apply_chat_template(
        messages_of(name), chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, is_learned = load_tokenizer(folder).encode_conversation(messages_of(name), apply_chat_template=True)
    assert tokens == expected["input_ids"]
    assert is_learned == [mask == 1 for mask in expected["assistant_masks"]]
    assert any(is_learned) and not all(is_learned)


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "by prefixes"])
def test_a_prompt_has_the_tokens_that_it_is_sampled_from(template, tmp_path):
    """The text before an answer is the result of `encode_prompt`, even if the tokenizer joins
    prompt and answer."""
    glued = template.replace("'<|im_start|>assistant\\n'", "'answer: ret'").replace(
        "{{- '<|im_start|>' + message.role + '\\n' }}",
        "{{- 'answer: ret' if message.role == 'assistant' else message.role }}",
    )
    tokenizer = load_tokenizer(write_byte_level(tmp_path, template=glued))
    asked = [{"role": "user", "content": "x"}]
    messages = [*asked, {"role": "assistant", "content": "urn x"}]
    tokens, is_learned = tokenizer.encode_conversation(messages, apply_chat_template=True)
    prompt, text = tokenizer.encode_prompt(asked, apply_chat_template=True)
    joined = tokenizer.encode_prompt(text + "urn x", apply_chat_template=False)[0]
    assert joined[: len(prompt)] != prompt, "the case must be one in which a token reaches over the border"
    assert tuple(tokens[: len(prompt)]) == prompt
    assert is_learned.index(True) == len(prompt)
    learned = [token for token, is_own in zip(tokens, is_learned, strict=True) if is_own]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "urn x<|im_end|>"


def test_without_a_template_each_answer_ends_with_the_end_of_text_token(tmp_path):
    tokenizer = load_tokenizer(write_byte_level(tmp_path, template=None, bos=True))
    messages = messages_of("system and several turns")
    tokens, is_learned = tokenizer.encode_conversation(messages, apply_chat_template=False)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    parts = [message["content"] + "<|im_end|>" * (message["role"] == "assistant") for message in messages]
    assert text == "<|endoftext|>" + "".join(parts)
    learned = [token for token, is_own in zip(tokens, is_learned, strict=True) if is_own]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "".join(answer + "<|im_end|>" for answer in answers)
    prompt, _ = tokenizer.encode_prompt(messages[:2], apply_chat_template=False)
    assert tuple(tokens[: len(prompt)]) == prompt and is_learned.index(True) == len(prompt)


def test_an_answer_whose_text_depends_on_later_messages_is_refused_and_a_last_one_is_not(tmp_path):
    tokenizer = load_tokenizer(write_byte_level(tmp_path, template=THINKING))
    messages = messages_of("system and several turns")
    with pytest.raises(ValueError, match=r"first 3 messages differently when others follow.*a row of its own"):
        tokenizer.encode_conversation(messages, apply_chat_template=True)
    tokens, is_learned = tokenizer.encode_conversation(messages[:3], apply_chat_template=True)
    learned = [token for token, is_own in zip(tokens, is_learned, strict=True) if is_own]
    answer = f"<think>\n\n</think>\n\n{messages[2]['content']}<|im_end|>"
    assert tokenizer.decode(learned, skip_special_tokens=False) == answer


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (UNMARKED, [("user", "hi")], "no message of the assistant"),
        (UNMARKED, [("assistant", "hi"), ("user", "hi")], "the first message is the assistant's"),
        (UNMARKED.replace("assistant\\n'", "bot\\n'"), [("user", "a"), ("assistant", "b")], "generation prompt"),
        ("{% generation %}{% endgeneration %}".join("ab"), [("user", "a"), ("assistant", "b")], None),
        (
            "{% if false %}{% generation %}x{% endgeneration %}{% endif %}hi",
            [("user", "a"), ("assistant", "b")],
            "no {% generation %} block",
        ),
        ("{{ raise_exception('no tools') }}", [("user", "a"), ("assistant", "b")], "refuses it: no tools"),
    ],
)
def test_what_cannot_be_told_is_one_sentence(template, messages, why, tmp_path):
    tokenizer = load_tokenizer(write_byte_level(tmp_path, template=template))
    rows = [{"role": role, "content": content} for role, content in messages]
    if why is None:  # a block without content: a mask of zeros, which the reader of files refuses
        assert not any(tokenizer.encode_conversation(rows, apply_chat_template=True)[1])
        return
    with pytest.raises(ValueError, match=why):
        tokenizer.encode_conversation(rows, apply_chat_template=True)


def test_a_model_without_end_of_text_token_is_told_the_cure(tmp_path):
    folder = write_byte_level(tmp_path, template=None)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="eos_token"):
        load_tokenizer(folder).encode_conversation(messages_of("one turn"), apply_chat_template=False)
