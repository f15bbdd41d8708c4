"""Prompt data sets: verl's and slime's rows, duplicates, lengths, errors that name the place; the cursor."""

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config import UserError
from megatron_dapo.data.prompts import PromptCursor, PromptDataset, content_of
from megatron_dapo.data.types import Prompt

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
    """A prompt that waits goes through JSON: its reward function must see the same before and after a resume."""
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


def test_the_prompt_column_may_have_another_name(write):
    rows = [{"question": "1+1=", "label": "2"}]
    assert load(write(rows), prompt_key="question").prompts[0].text == "1+1="


def test_rows_with_equal_content_are_one_prompt_whatever_their_index(write):
    rows = [
        verl_row("p1", index="a"),
        verl_row("p2", index="b"),
        verl_row("p1", index="c"),
        verl_row("p1", answer="35"),
    ]
    data = load(write(rows))
    assert [(p.text, p.ground_truth) for p in data.prompts] == [("p1", "34"), ("p2", "34"), ("p1", "35")]
    assert [p.index for p in data.prompts] == [0, 1, 2]
    assert len({p.key for p in data.prompts}) == 3
    assert data.report[0].num_duplicates == 1
    assert len(load(write(rows), dedup=False).prompts) == 4


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
    kept = [(p.text, p.ground_truth) for p in load(str(path)).prompts]
    assert kept == [(f"p{p}", f"{a}") for p, a in dict.fromkeys(contents)]


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


def test_the_data_sources_are_listed_once(write):
    rows = [verl_row("a"), verl_row("b"), {**verl_row("c"), "data_source": "aime"}]
    assert load(write(rows)).data_sources == ["aime", "math_dapo"]


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
    del state["content"]  # of an earlier version
    PromptCursor(4, 1, content=content_of(prompts)).load_state_dict(state)
