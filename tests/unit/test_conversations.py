"""Files of conversations: allowed rows, their use, and messages about misfits."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.conversations import ConversationSet
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.training.conversation_batches import ConversationDraws
from tests.sft_files import TEMPLATE, conversations, write_rows
from tests.tiny_models import EOS_ID, make_tokenizer

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(folder)


def load(path, tokenizer, *overrides: str) -> ConversationSet:
    return ConversationSet.load([str(path)], load_config(None, ["sft.enable=true", *overrides]), tokenizer)


def texts(loaded: ConversationSet, tokenizer) -> list[tuple[str, str]]:
    """Of each conversation the whole text, and its learned part."""
    rows = []
    for sample in loaded.samples:
        learned = sample.tokens[1:][sample.loss_mask[:-1] == 1]
        rows.append(tuple(tokenizer.decode(t, skip_special_tokens=False) for t in (sample.tokens, learned)))
    return rows


CHAT = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]


def test_messages_and_prompts_with_responses_are_the_same_conversation(tmp_path, tokenizer):
    rows = [
        {"messages": CHAT},
        {"prompt": "1+2", "response": "3"},
        {"prompt": CHAT[:1], "response": "3"},
        {"messages": None, "prompt": "1+2", "response": "3"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert texts(load(path, tokenizer), tokenizer) == [("u:1+2<eos>a:3<eos>", "3<eos>")] * 4
    plain = texts(load(path, tokenizer, "data.apply_chat_template=false"), tokenizer)
    assert plain == [("1+23<eos>", "3<eos>")] * 4


def test_every_answer_of_several_turns_is_learned(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "be"}, *CHAT, {"role": "user", "content": "x"}, CHAT[1]]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    assert texts(load(path, tokenizer), tokenizer) == [("s:be<eos>u:1+2<eos>a:3<eos>u:x<eos>a:3<eos>", "3<eos>3<eos>")]


def test_parquet_files_with_columns_of_their_own_names(tmp_path, tokenizer):
    """As verl's SFT data of GSM8K: question and answer in an object. A message has all fields of
    the column's type."""
    nested = [{"extra_info": {"question": "1+2", "answer": "3"}, "split": "train"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "nested.parquet")
    keys = ("data.prompt_key=extra_info.question", "sft.response_key=extra_info.answer")
    assert texts(load(tmp_path / "nested.parquet", tokenizer, *keys), tokenizer)[0][1] == "3<eos>"

    chat = [{"chat": [{**CHAT[0], "tool_calls": None}, CHAT[1] | {"tool_calls": None}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chat), tmp_path / "chat.parquet")
    loaded = load(tmp_path / "chat.parquet", tokenizer, "sft.messages_key=chat", "data.prompt_template=q {prompt}")
    assert texts(loaded, tokenizer) == [("u:1+2<eos>a:3<eos>", "3<eos>")]


def test_the_prompt_template_is_asked(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+2", "response": "3"}])
    assert texts(load(path, tokenizer, "data.prompt_template={prompt}="), tokenizer)[0][0] == "u:1+2=<eos>a:3<eos>"


def test_overlong_conversations_are_dropped_and_counted(tmp_path, tokenizer):
    """The length counts every token: `u:1+2<eos>a:3<eos>` has ten."""
    rows = [{"prompt": "1+2", "response": "3"}, {"prompt": "1+2", "response": "33"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    loaded = load(path, tokenizer, "sft.max_length=10")
    assert [len(sample.tokens) for sample in loaded.samples] == [10]
    assert str(loaded.report[0]) == f"{path}: 1 conversations of 2 rows, 1 over-long"
    with pytest.raises(UserError, match=r"no conversation is left: .*2 over-long; .*sft\.max_length"):
        load(path, tokenizer, "sft.max_length=9")


def test_the_loss_mask_stands_where_a_token_is_predicted(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1", "response": "23"}])
    (sample,) = load(path, tokenizer).samples
    assert sample.tokens[-1] == EOS_ID and sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, r"row 1: there is neither a column 'messages' nor 'prompt' with 'response' \(columns"),
        ({"prompt": "x"}, r"neither a column 'messages'.*sft\.messages_key, or with data\.prompt_key and sft\.resp"),
        ({"prompt": "x", "response": 3}, r"row 1, column 'response': expected text, found int '3'"),
        ({"prompt": 3, "response": "x"}, r"row 1, column 'prompt': expected text or messages, found int"),
        ({"messages": "x"}, r"row 1, column 'messages': expected messages with a role and a content"),
        ({"messages": [{"role": "user"}]}, r"expected messages with a role and a content"),
        ({"messages": CHAT[:1]}, r"row 1: there is no message of the assistant, and so nothing to learn"),
        ({"messages": CHAT[1:]}, r"the first message is the assistant's"),
        ([1], r"row 1: expected an object with named columns, found list"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_learned_from_is_named(row, said, tmp_path, tokenizer):
    with pytest.raises(UserError, match=said) as raised:
        load(write_rows(tmp_path / "rows.jsonl", [row]), tokenizer)
    assert len(raised.value.sentences) == 1


def test_a_parquet_file_without_the_columns_is_told_before_a_row_is_read(tmp_path, tokenizer):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "x"}]), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet: there is neither"):
        load(tmp_path / "rows.parquet", tokenizer)


def test_every_conversation_is_drawn_once_per_epoch_and_a_saved_order_goes_on(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", conversations(7, seed=0))
    config = load_config(None, ["sft.enable=true"])
    whole = ConversationDraws.of(load(path, tokenizer), config)
    batches = [[sample.uid for sample in whole.next(4)] for _ in range(7)]
    drawn = [uid for batch in batches for uid in batch]
    for epoch in range(4):
        assert sorted(drawn[7 * epoch : 7 * (epoch + 1)], key=int) == [str(i) for i in range(7)]
    assert drawn[:7] != drawn[7:14] != sorted(drawn[7:14])

    first = ConversationDraws.of(load(path, tokenizer), config)
    for _ in range(3):
        first.next(4)
    state = json.loads(json.dumps(first.state_dict()))
    again = ConversationDraws.of(load(path, tokenizer), config)
    again.load_state_dict(state)
    samples = again.next(4)
    assert [sample.uid for sample in samples] == batches[3]
    # results find their way by them
    assert [sample.sample_id for sample in samples] == [0, 1, 2, 3]

    others = write_rows(tmp_path / "others.jsonl", conversations(7, seed=1))
    with pytest.raises(UserError, match="content of the prompts"):
        ConversationDraws.of(load(others, tokenizer), config).load_state_dict(state)
