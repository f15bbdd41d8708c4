"""The light tokenizer gives the tokens of transformers' AutoTokenizer,
and names a folder's gaps."""

import subprocess
import sys
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.tokenizer import load_tokenizer
from tests.model_folders import write, write_byte_level

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory):
    """Plain; with a BOS token, as Llama 3; with the tokenizer class that Qwen checkpoints name."""
    with_bos = write_byte_level(tmp_path_factory.mktemp("bos"), bos=True)
    return folder, with_bos, write_byte_level(tmp_path_factory.mktemp("qwen"), "Qwen2Tokenizer")


@pytest.fixture(scope="module")
def auto_tokenizer():
    from transformers import AutoTokenizer

    return lambda folder: AutoTokenizer.from_pretrained(folder, local_files_only=True)


CHATS = [
    [{"role": "user", "content": "What is 2+3?"}],
    [{"role": "system", "content": "Be brief é\n"}, {"role": "user", "content": " 12345 <|im_end|> x "}],
]


def test_chat_prompts_have_the_tokens_of_transformers(folders, auto_tokenizer):
    for path in folders:
        ours, reference = load_tokenizer(path), auto_tokenizer(path)
        for chat in CHATS:
            tokens, text = ours.encode_prompt(chat, apply_chat_template=True)
            assert text == reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            assert list(tokens) == reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_plain_prompts_and_decoding_agree_with_transformers(folders, auto_tokenizer):
    pairs = [(load_tokenizer(path), auto_tokenizer(path)) for path in folders]

    @settings(max_examples=100, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    def agree(text):
        for ours, reference in pairs:
            tokens, same = ours.encode_prompt(text, apply_chat_template=False)
            assert same == text
            assert list(tokens) == reference(text)["input_ids"]
            for skip in (True, False):
                assert ours.decode(tokens, skip) == reference.decode(
                    tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
        assert pairs[0][0].decode(pairs[0][0].encode_prompt(text, False)[0]) == unicodedata.normalize("NFC", text)

    agree()


def test_a_character_tokenizer_made_by_transformers_reads_the_same(tmp_path, auto_tokenizer):
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+=,:"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    made.save_pretrained(tmp_path)
    ours, reference = load_tokenizer(tmp_path), auto_tokenizer(tmp_path)
    tokens, _ = ours.encode_prompt([{"role": "user", "content": "12+"}, {"role": "user", "content": "3="}], False)
    assert list(tokens) == reference("12+3=")["input_ids"] == [vocabulary[c] for c in "12+3="]
    assert ours.decode([*tokens, 1]) == "12+3="
    assert ours.decode([*tokens, 1], skip_special_tokens=False) == "12+3=<eos>"
    assert (ours.eos_token_ids, ours.num_tokens) == ((1,), len(reference))


def test_every_end_of_sequence_token_is_found_once(folder, tmp_path):
    assert load_tokenizer(folder).eos_token_ids == (0, 2)
    write_byte_level(tmp_path)
    write(tmp_path, "generation_config.json", {"eos_token_id": [2, 7]})
    assert load_tokenizer(tmp_path).eos_token_ids == (2, 7, 0)


def test_a_template_file_wins_over_the_one_in_the_config(tmp_path):
    write_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert load_tokenizer(tmp_path).encode_prompt("hi", True)[1] == "file: hi"


def test_of_several_named_templates_the_default_is_used(tmp_path):
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    write_byte_level(tmp_path, template=templates)
    assert load_tokenizer(tmp_path).encode_prompt("hi", True)[1] == "hi!"


def test_a_model_without_chat_template_is_told_the_cure(tmp_path):
    tokenizer = load_tokenizer(write_byte_level(tmp_path, template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="data.apply_chat_template: false"):
        tokenizer.encode_prompt("hi", True)


def test_a_template_cannot_reach_the_machine_and_may_refuse(tmp_path):
    write_byte_level(tmp_path, template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="refuses"):
        load_tokenizer(tmp_path).encode_prompt("hi", True)
    write_byte_level(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        load_tokenizer(tmp_path).encode_prompt("hi", True)


def test_a_folder_without_a_readable_tokenizer_is_told(tmp_path):
    with pytest.raises(UserError, match=r"actor_rollout_ref\.model\.path.*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").touch()  # AutoTokenizer would divide words by another pattern
    with pytest.raises(UserError, match=r"no tokenizer\.json; make one of tiktoken\.model with the pattern .*Kimi"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
    write_byte_level(tmp_path, template="{% if %}")
    with pytest.raises(UserError, match="does not compile"):
        load_tokenizer(tmp_path)


def test_reading_a_tokenizer_does_not_import_transformers(folder):
    script = (
        "import sys; from megatron_dapo.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
