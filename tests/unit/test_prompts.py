"""Prompt data sets: verl's and slime's rows, duplicates, lengths, errors with the place;
the cursor."""

import gzip
import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.prompt_cursor import PromptCursor, content_of
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rollout.build_rollout import load_prompts

pytestmark = pytest.mark.unit


class CharTokenizer:
    """One token per character."""

    def encode_prompt(self, prompt, apply_chat_template):
        text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        if "refuse" in text:
            raise ValueError("the template refuses it")
        text = f"<{text}>" if apply_chat_template else text
        return tuple(map(ord, text)), text

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(map(chr, tokens))


def verl_row(problem, answer="34", index="a1"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": problem}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def load(*files, max_prompt_length=100, apply_chat_template=False, prompt_key="prompt", **options):
    return PromptDataset.load(
        files, prompt_key, CharTokenizer(), max_prompt_length, apply_chat_template=apply_chat_template, **options
    )


@pytest.fixture(params=["jsonl", "parquet"])
def write(request, tmp_path):
    writer = {"jsonl": write_jsonl, "parquet": write_parquet}[request.param]
    return lambda rows, name="data": writer(tmp_path / f"{name}.{request.param}", rows)


def test_verl_rows_become_prompts(write):
    (prompt,) = load(write([verl_row("1+1=")]), apply_chat_template=True).prompts
    assert (prompt.index, prompt.text, prompt.tokens) == (0, "<1+1=>", tuple(map(ord, "<1+1=>")))
    assert (prompt.data_source, prompt.ground_truth) == ("math_dapo", "34")
    assert prompt.extra_info == {"index": "a1"}


def test_slime_rows_become_prompts(write):
    (prompt,) = load(write([{"prompt": "1+1=", "label": 2}])).prompts
    assert (prompt.text, prompt.ground_truth, prompt.data_source, prompt.extra_info) == ("1+1=", "2", "", {})


def test_extra_info_of_parquet_is_what_a_checkpoint_gives_back(tmp_path):
    """A prompt that waits goes through JSON: its reward function must see the same
    before and after a resume."""
    extra_info = {
        "when": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "price": Decimal("1.50"),
        "nested": {"scores": [1, 2.5], "name": None},
    }
    path = write_parquet(tmp_path / "rows.parquet", [{**verl_row("p"), "extra_info": extra_info}])
    (prompt,) = load(path).prompts
    assert prompt.extra_info == {
        "when": "2026-01-02T03:04:00+00:00",
        "day": "2026-01-02",
        "price": "1.50",
        "nested": {"scores": [1, 2.5], "name": None},
    }
    assert json.loads(json.dumps(prompt.extra_info)) == prompt.extra_info


def test_extra_info_that_no_checkpoint_can_hold_is_an_error_that_names_its_place(tmp_path):
    rows = [verl_row("p"), {**verl_row("q"), "extra_info": {"index": "a2", "images": [b"\xff"]}}]
    with pytest.raises(UserError, match=r"row 2, column 'extra_info.images': .* bytes values; store text"):
        load(write_parquet(tmp_path / "rows.parquet", rows))


@pytest.mark.parametrize("twice", ["prompt", "reward_model"])
def test_two_columns_of_one_name_are_refused(tmp_path, twice):
    table = pyarrow.Table.from_pylist([verl_row("p")])
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table.append_column(twice, table[twice]), path)
    with pytest.raises(UserError, match=rf"rows.parquet: there are 2 columns '{twice}'; remove or rename"):
        load(path)


def test_a_column_that_is_not_read_may_be_there_twice(tmp_path):
    table = pyarrow.Table.from_pylist([verl_row("p")])
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table.append_column("ability", table["ability"]), path)
    assert len(load(path).prompts) == 1


def test_rows_with_equal_content_are_one_prompt_whatever_their_index(write):
    rows = [
        verl_row("p1", index="a"),
        verl_row("p2", index="b"),
        verl_row("p1", index="c"),
        verl_row("p1", answer="35"),
    ]
    data = load(write(rows), conflicting_answers="keep")
    assert [(p.text, p.ground_truth) for p in data.prompts] == [("p1", "34"), ("p2", "34"), ("p1", "35")]
    assert [p.index for p in data.prompts] == [0, 1, 2]
    assert len({p.key for p in data.prompts}) == 3
    assert data.report[0].num_duplicates == 1
    assert len(load(write(rows), dedup=False, conflicting_answers="keep").prompts) == 4


def test_duplicates_are_found_across_files_and_formats(tmp_path):
    files = [
        write_jsonl(tmp_path / "a.jsonl", [verl_row("p1")]),
        write_parquet(tmp_path / "b.parquet", [verl_row("p1")]),
    ]
    data = load(*files)
    assert [report.num_kept for report in data.report] == [1, 0]
    assert str(data.report[1]) == f"{files[1]}: 0 prompts of 1 rows, 1 duplicates"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=40))
def test_dedup_keeps_exactly_the_first_of_each_content(tmp_path_factory, contents):
    path = tmp_path_factory.getbasetemp() / "dedup.jsonl"
    write_jsonl(path, [verl_row(f"p{p}", f"{a}", index=i) for i, (p, a) in enumerate(contents)])
    kept = [(p.text, p.ground_truth) for p in load(str(path), conflicting_answers="keep").prompts]
    assert kept == [(f"p{p}", f"{a}") for p, a in dict.fromkeys(contents)]


def test_a_prompts_key_is_that_of_earlier_versions(tmp_path):
    """Checkpoints hold a hash of the keys: a run resumes only with the same keys."""
    content = json.dumps([verl_row("p\u00e9")["prompt"], "34"], sort_keys=True)
    (prompt,) = load(write_jsonl(tmp_path / "a.jsonl", [verl_row("p\u00e9")])).prompts
    assert prompt.key == hashlib.sha256(content.encode()).hexdigest()[:32]


def test_a_prompt_with_two_answers_is_refused_and_both_rows_are_named(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [verl_row("p1"), verl_row("p2", index="x"), verl_row("p2", index="y")])
    second = write_parquet(tmp_path / "b.parquet", [verl_row("p1"), verl_row("p2", answer="35")])
    assert len(load(first).prompts) == 2  # the same prompt with the same answer is none
    for dedup in (True, False):
        with pytest.raises(UserError) as caught:
            load(first, second, dedup=dedup)
        (sentence,) = caught.value.sentences
        for words in (f"{second}, row 2: the answer is '35'", f"'34' for the same prompt in {first}, row 2"):
            assert words in sentence
        assert "data.conflicting_answers" in sentence


def test_the_first_prompts_with_two_answers_are_named_and_the_others_counted(tmp_path):
    rows = [verl_row(f"p{number}", answer=answer) for answer in "12" for number in range(5)]
    with pytest.raises(UserError) as caught:
        load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [f"row {number}:" in words for number, words in zip((6, 7, 8), caught.value.sentences, strict=True)] == (
        [True] * 3
    )
    assert "(2 more prompts" in caught.value.sentences[-1]


def test_a_run_asks_for_conflicting_answers_by_its_key_and_not_in_multi_turn_rollouts(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [verl_row("p"), verl_row("q"), verl_row("q", answer="35")])

    def prompts(*overrides):
        config = load_config(None, ["data.apply_chat_template=false", *overrides])
        return [prompt.text for prompt in load_prompts([path], config, CharTokenizer())]

    with pytest.raises(UserError, match="row 3: the answer is '35'"):
        prompts()
    assert prompts("data.conflicting_answers=drop") == ["p"]
    assert prompts("data.conflicting_answers=keep") == ["p", "q", "q"]
    assert prompts("actor_rollout_ref.rollout.multi_turn.enable=true") == ["p", "q", "q"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=40), st.booleans())
def test_dropping_leaves_the_prompts_that_have_one_answer(tmp_path_factory, contents, dedup):
    path = str(tmp_path_factory.getbasetemp() / "conflicts.jsonl")
    write_jsonl(tmp_path_factory.getbasetemp() / "conflicts.jsonl", [verl_row(f"p{p}", f"{a}") for p, a in contents])
    with_one = [(p, a) for p, a in contents if len({b for q, b in contents if q == p}) == 1]
    expected = [(f"p{p}", f"{a}") for p, a in (dict.fromkeys(with_one) if dedup else with_one)]
    if not expected:
        with pytest.raises(UserError, match="no prompt is left: .*with conflicting answers"):
            load(path, dedup=dedup, conflicting_answers="drop")
        return
    data = load(path, dedup=dedup, conflicting_answers="drop")
    assert [(prompt.text, prompt.ground_truth) for prompt in data.prompts] == expected
    assert [prompt.index for prompt in data.prompts] == list(range(len(expected)))
    assert data.report[0].num_kept == len(expected)


def test_overlong_prompts_are_dropped_cut_from_the_left_or_refused(write):
    path = write([verl_row("123456"), verl_row("1234")])
    dropped = load(path, max_prompt_length=4)
    assert ([p.text for p in dropped.prompts], dropped.report[0].num_overlong) == (["1234"], 1)
    cut = load(path, max_prompt_length=4, filter_overlong=False, truncation="left")
    assert [p.text for p in cut.prompts] == ["3456", "1234"]
    assert cut.report[0].num_truncated == 1
    with pytest.raises(UserError, match=r"row 1: the prompt has 6 tokens, data\.max_prompt_length is 4"):
        load(path, max_prompt_length=4, filter_overlong=False, truncation="error")


def without(row, column):
    return {name: value for name, value in row.items() if name != column}


BAD_ROWS = [
    (without(verl_row("p"), "prompt"), ["'prompt' is missing", "data.prompt_key", "ability"]),
    (without(verl_row("p"), "reward_model"), ["answer is missing", "reward_model.ground_truth", "label"]),
    ({**verl_row("p"), "prompt": []}, ["column 'prompt'", "found list"]),
    ({**verl_row("p"), "prompt": [{"role": "user"}]}, ["column 'prompt'"]),
    ({**verl_row("p"), "prompt": [{"role": "user", "content": None}]}, ["column 'prompt'"]),
    ({**verl_row("p"), "prompt": 7}, ["column 'prompt'", "int '7'"]),
    ({**verl_row("p"), "reward_model": {"style": "rule"}}, ["column 'reward_model.ground_truth'", "NoneType"]),
    ({"prompt": "p", "label": [1]}, ["column 'label'", "list"]),
    ({**verl_row("p"), "extra_info": "x"}, ["column 'extra_info'", "an object"]),
    ({**verl_row("p"), "data_source": 3}, ["column 'data_source'", "text"]),
    (verl_row("refuse"), ["column 'prompt'", "the template refuses it"]),
    (verl_row(""), ["column 'prompt'", "no tokens"]),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_named_by_file_row_and_column(tmp_path, row, words):
    path = write_jsonl(tmp_path / "data.jsonl", [verl_row("fine"), row])
    with pytest.raises(UserError) as caught:
        load(path)
    (sentence,) = caught.value.sentences
    assert all(word in sentence for word in [f"{path}, row 2", *words])


def test_parquet_errors_name_the_place_too(tmp_path):
    path = write_parquet(tmp_path / "data.parquet", [verl_row("p"), {**verl_row("p"), "reward_model": None}])
    with pytest.raises(UserError, match=r"data\.parquet, row 2: the answer is missing"):
        load(path)
    with pytest.raises(UserError, match=r"data\.parquet: column 'question' is missing .*data\.prompt_key"):
        load(path, prompt_key="question")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="broken.*cannot be read as parquet"):
        load(str(tmp_path / "broken.parquet"))


ROW = '{"prompt": "p", "label": "1"}\n'
DAMAGED_LINES = {
    "Latin-1": ('{"prompt": "caf\u00e9", "label": "1"}'.encode("latin-1"), "not UTF-8 (byte 0xe9 at position 15)"),
    "half of a pair": (b'{"prompt": "\\ud800 ", "label": "1"}', "'\\ud800' is half of a surrogate pair"),
    "half of a pair in a key": (b'{"prompt": "p", "label": "1", "extra_info": {"\\uDFFF": 1}}', "half of a surrogate"),
    "lists 100 000 deep": (b'{"prompt": "p", "label": "1", "extra_info": ' + b"[" * 100_000, "more than 100 deep"),
    "lists 400 deep": (
        b'{"prompt": "p", "label": "1", "extra_info": {"a": ' + b"[" * 400 + b"]" * 400 + b"}}",
        "more than 100 deep",
    ),
    "NaN": (b'{"prompt": "p", "label": NaN}', "NaN is no JSON number"),
    "-Infinity": (b'{"prompt": "p", "label": "1", "extra_info": {"a": [-Infinity]}}', "-Infinity is no JSON number"),
    "too large a number": (b'{"prompt": "p", "label": 1e999}', "inf is no answer"),
    "a key that is there twice": (b'{"prompt": "p", "label": "1", "label": "2"}', "the key 'label' occurs twice"),
    "a key that is there twice inside": (b'{"prompt": "p", "reward_model": {"a": 1, "a": 1}}', "the key 'a' occurs"),
}


@pytest.mark.parametrize("kind", DAMAGED_LINES)
def test_a_line_that_is_no_text_or_no_json_is_named(tmp_path, kind):
    line, words = DAMAGED_LINES[kind]
    (tmp_path / "bad.jsonl").write_bytes(ROW.encode() + line + b"\n" + ROW.encode())
    with pytest.raises(UserError) as caught:
        load(str(tmp_path / "bad.jsonl"))
    (sentence,) = caught.value.sentences
    assert f"{tmp_path}/bad.jsonl, row 2" in sentence and words in sentence


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_refused_where_a_reward_reads_it(write, answer):
    """Silence would equal it."""
    path = write([verl_row("p"), verl_row("q", answer=answer)])
    with pytest.raises(UserError, match=r"row 2, column 'reward_model.ground_truth': the answer is empty; correct or"):
        load(path)
    assert [prompt.ground_truth for prompt in load(path, needs_answer=False).prompts] == ["34", answer]


def test_a_key_that_is_there_twice_is_found_among_very_many(tmp_path):
    """Counting each key in turn would take hours."""
    keys = ", ".join(f'"{number}": 0' for number in [*range(300_000), 299_999])
    (tmp_path / "bad.jsonl").write_text(f'{{"prompt": "p", "label": "1", "extra_info": {{{keys}}}}}\n')
    with pytest.raises(UserError, match="the key '299999' occurs twice"):
        load(str(tmp_path / "bad.jsonl"))


def test_whole_surrogate_pairs_byte_order_marks_and_windows_line_ends_are_read(tmp_path):
    content = b"\xef\xbb\xbf" + b'{"prompt": "\\ud83d\\ude00 \xf0\x9f\x98\x80", "label": "1"}\r\n'
    (tmp_path / "fine.jsonl").write_bytes(content)
    assert load(str(tmp_path / "fine.jsonl")).prompts[0].text == "\U0001f600 \U0001f600"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(ROW.encode()), "gzip-compressed; decompress it"),
        (ROW.encode("utf-16"), "UTF-16 text; write it as UTF-8"),
        (b"PAR1", "a parquet file"),
    ],
    ids=["gzip", "UTF-16", "parquet"],
)
def test_a_file_of_another_kind_under_a_jsonl_name_is_told(tmp_path, content, words):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=f"bad.jsonl' is {words}"):
        load(str(tmp_path / "bad.jsonl"))


def test_a_line_that_is_too_large_is_named_without_being_read(tmp_path):
    """A sparse file of 64 GiB: who reads the line as a whole has no memory for it."""
    path = tmp_path / "huge.jsonl"
    path.write_text(ROW)
    os.truncate(path, 64 << 30)
    with pytest.raises(UserError, match=r"huge\.jsonl, row 2: the row is larger than 32 MiB"):
        load(str(path))


def test_a_parquet_row_that_is_too_large_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dapo.data.prompt_files.MAX_ROW_BYTES", 2000)
    rows = [{**verl_row(f"p{number}"), "extra_info": {"tests": ["x" * 50] * 4}} for number in range(200)]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    assert len(load(path).prompts) == 200  # together they are larger
    for place in ("extra_info", "prompt"):
        large = {"extra_info": {"tests": ["x" * 100] * 20}} if place == "extra_info" else verl_row("x" * 2000)
        path = write_parquet(tmp_path / "rows.parquet", [*rows[:140], {**rows[0], **large}, *rows])
        with pytest.raises(UserError, match=r"rows\.parquet, row 141: the row is larger"):
            load(path)


def test_a_row_of_a_dictionary_column_is_as_large_as_its_own_value(tmp_path, monkeypatch):
    """As pandas writes a column of type category: each slice of it has the values of all rows."""
    monkeypatch.setattr("megatron_dapo.data.prompt_files.MAX_ROW_BYTES", 2000)
    small = [f"p{number}" + 50 * "x" for number in range(200)]
    path = tmp_path / "rows.parquet"

    def write(prompts):
        column = pyarrow.array(prompts).dictionary_encode()
        pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "label": ["1"] * len(prompts)}), path)

    write(small)
    assert len(load(str(path)).prompts) == 200
    write([*small[:140], "x" * 2000, *small[140:]])
    with pytest.raises(UserError, match=r"rows\.parquet, row 141: the row is larger"):
        load(str(path))


def test_a_prompt_that_is_too_large_is_named_before_it_is_tokenized(write):
    with pytest.raises(UserError, match=r"row 2, column 'prompt': the prompt is larger than 4 MiB"):
        load(write([verl_row("p"), verl_row("x" * (4 << 20))]), max_prompt_length=10 << 20)


@pytest.mark.parametrize("codec", ["snappy", "zstd", "none"])
def test_a_parquet_file_with_a_damaged_data_page_is_named(tmp_path, codec):
    path = tmp_path / "rows.parquet"
    rows = [verl_row(f"{number} {os.urandom(40).hex()}") for number in range(3000)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path, compression=codec, write_page_checksum=codec == "zstd")
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + b"\xff" * 2000 + content[middle + 2000 :])
    with pytest.raises(UserError, match=r"rows\.parquet"):
        load(str(path), max_prompt_length=1000)


def test_files_that_cannot_be_read_are_told(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p", "label": "1"}\n{oops\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, row 2: this line is no JSON"):
        load(str(tmp_path / "bad.jsonl"))
    with pytest.raises(UserError, match=r"nowhere\.jsonl' does not exist .*data\.train_files"):
        load(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(UserError, match=r"data\.csv.*\.jsonl or \.parquet"):
        load(str(tmp_path / "data.csv"))


def test_a_data_set_without_prompts_is_an_error(tmp_path):
    with pytest.raises(UserError, match="data.train_files"):
        load()
    with pytest.raises(UserError, match="has no rows"):
        load(write_jsonl(tmp_path / "empty.jsonl", []))
    with pytest.raises(UserError, match=r"all 1 prompts are longer than data\.max_prompt_length = 2"):
        load(write_jsonl(tmp_path / "long.jsonl", [verl_row("long")]), max_prompt_length=2)


@given(st.integers(1, 30), st.integers(), st.booleans(), st.lists(st.integers(1, 50), max_size=12))
def test_every_prompt_comes_once_per_epoch_however_it_is_drawn(num_prompts, seed, shuffle, draws):
    cursor = PromptCursor(num_prompts, seed, shuffle)
    drawn = [index for count in draws for index in cursor.next(count)]
    assert len(drawn) == sum(draws)
    assert cursor.epoch == len(drawn) // num_prompts
    epochs = [drawn[start : start + num_prompts] for start in range(0, len(drawn), num_prompts)]
    for epoch in epochs:
        assert Counter(epoch).most_common(1)[0][1] == 1
        assert set(epoch) <= set(range(num_prompts))
        assert shuffle or epoch == list(range(len(epoch)))


@given(st.integers(1, 30), st.integers(), st.booleans(), st.integers(0, 100), st.integers(0, 100))
def test_a_resumed_cursor_continues_the_same_order(num_prompts, seed, shuffle, before, after):
    cursor = PromptCursor(num_prompts, seed, shuffle)
    cursor.next(before)
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = PromptCursor(num_prompts, seed, shuffle)
    resumed.load_state_dict(state)
    assert resumed.next(after) == cursor.next(after)
    assert resumed.state_dict() == cursor.state_dict()


def test_the_order_depends_on_seed_and_epoch_only():
    first, second, other = PromptCursor(50, 1), PromptCursor(50, 1), PromptCursor(50, 2)
    epochs = first.next(50), first.next(50)
    assert second.next(100) == [*epochs[0], *epochs[1]]
    assert epochs[0] != epochs[1]
    assert other.next(50) != epochs[0]
    assert PromptCursor(8, 1).next(8) == [1, 5, 4, 2, 7, 0, 3, 6]  # Python 3.11 and 3.12 alike


def test_a_cursor_of_other_data_is_refused():
    state = PromptCursor(10, 1).state_dict()
    with pytest.raises(UserError, match="number of prompts was 10 .* 11 now"):
        PromptCursor(11, 1).load_state_dict(state)
    with pytest.raises(UserError, match=r"data\.seed was 1 .* 2 now"):
        PromptCursor(10, 2).load_state_dict(state)


def test_a_cursor_of_as_many_other_prompts_is_refused():
    """A file that was made again under its name: each number is another prompt."""
    prompts = [Prompt(number, f"key{number}", (1,), "", "", "") for number in range(4)]
    state = PromptCursor(4, 1, content=content_of(prompts)).state_dict()
    PromptCursor(4, 1, content=content_of(list(prompts))).load_state_dict(state)
    for other in (prompts[::-1], [*prompts[:3], replace(prompts[3], key="key9")]):
        with pytest.raises(UserError, match="content of the prompts.*accept_missing=.controller"):
            PromptCursor(4, 1, content=content_of(other)).load_state_dict(state)


def test_columns_and_words_around_the_prompt_are_what_the_config_says(write, tmp_path):
    rows = [
        {"question": "1+1", "answer": 2.0, "data_source": "own"},
        {"question": "1+2", "answer": 3.0, "data_source": None},
    ]
    columns = {"answer_key": "answer", "prompt_template": "Q: {prompt}\n{A}", "data_source": "default"}
    prompts = load(write(rows), prompt_key="question", **columns).prompts
    assert [(prompt.text, prompt.ground_truth, prompt.data_source) for prompt in prompts] == [
        ("Q: 1+1\n{A}", "2.0", "own"),
        ("Q: 1+2\n{A}", "3.0", "default"),
    ]
    with pytest.raises(UserError, match="row 1.*'solution'.*name yours with data.answer_key"):
        load(write(rows), prompt_key="question", answer_key="solution")
    chat = [{"question": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    with pytest.raises(UserError, match="data.prompt_template takes text"):
        load(write(chat), prompt_key="question", **columns)
