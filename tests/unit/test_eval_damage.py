"""A damaged file of answers ends the command with one sentence, or makes no difference.

Never a traceback, and never figures of other answers than the given ones.
"""

import json
import os
from pathlib import Path

import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.commands.evaluation.answer_file import AnswerFile
from megatron_dapo.common.errors import UserError
from tests.answer_records import ANSWER
from tests.bounded_process import run_bounded

pytestmark = pytest.mark.unit

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "1" + "0" * 400


@pytest.fixture
def answers(tmp_path) -> Path:
    """Four answers to each of two prompts."""
    lines = [
        ANSWER | {"prompt_index": prompt, "prompt_key": f"k{prompt}", "number": number, "correct": number == 0}
        for number in range(4)
        for prompt in range(2)
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def third_line(content: str | bytes):
    def damage(path: Path) -> None:
        lines = path.read_bytes().split(b"\n")
        lines[2] = content.encode() if isinstance(content, str) else content
        path.write_bytes(b"\n".join(lines))

    return damage


def value(name: str, text: str):
    """Give the third answer this value."""
    record = ANSWER | {"number": 1, name: "HERE"}
    return third_line(json.dumps(record).replace('"HERE"', text))


def without(name: str):
    return third_line(json.dumps({key: kept for key, kept in (ANSWER | {"number": 1}).items() if key != name}))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def linked(target: str):
    def damage(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return damage


def endless(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(60 << 30)


def twice(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


USED = ("prompt_index", "number", "prompt_key", "prompt", "data_source", "answer", "correct", "raw_reward",
        "num_tokens", "finish_reason")  # fmt: skip
DAMAGE = {
    "no JSON": third_line('{"prompt_index": 0, "num'),
    "bytes": third_line(bytes(set(range(256)) - {10})),
    "an empty line": third_line(""),
    "no object": third_line("[1]"),
    "deep": third_line(DEEP),
    "a deep value": value("ground_truth", DEEP),
    **{f"no {name}": without(name) for name in USED},
    **{f"{name} is a list": value(name, "[1]") for name in USED},
    "a prompt by text": value("prompt_index", '"0"'),
    "a prompt below 0": value("prompt_index", "-1"),
    "a prompt that no float holds": value("prompt_index", HUGE),
    "a reward that is null": value("raw_reward", "null"),
    "a reward that is NaN": value("raw_reward", "NaN"),
    "a reward that no float holds": value("raw_reward", HUGE),
    "a verdict that is text": value("correct", '"no"'),
    "a vote that is a number": value("answer", "4"),
    "an answer twice": twice,
    "a pipe": fifo,
    "a device without end": linked("/dev/zero"),
    "a link to itself": linked("answers.jsonl"),
    "sixty gigabytes": endless,
    "empty": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_of_answers_ends_in_a_sentence(answers, tmp_path, what):
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(answers.read_bytes())
    DAMAGE[what](answers)
    ended = run_bounded(lambda: main(["eval", "--compare", str(whole), str(answers)]))
    lines = ended.error.splitlines()
    assert ended.code == 2 and len(lines) == 2 and lines[0] == "1 mistake to correct:", ended.error[-1500:]
    assert str(answers) in lines[1] and len(lines[1]) < 500


def test_the_same_undamaged_file_is_compared(answers, capsys):
    assert main(["eval", "--compare", str(answers), str(answers)]) == 0
    shown = capsys.readouterr().out
    assert "aime: 2 prompts" in shown and "pass@4" in shown and "pass@8" not in shown


@pytest.mark.parametrize("what", [name for name in DAMAGE if name not in ("empty", "a link to itself")])
def test_an_evaluation_does_not_go_on_with_damaged_answers(answers, what):
    """Nor does it change the file, which somebody may mend."""
    DAMAGE[what](answers)
    before = answers.stat().st_size
    with pytest.raises(UserError, match="answers.jsonl"):
        AnswerFile(answers)
    assert answers.stat().st_size == before


@pytest.mark.parametrize("cut", [b"{", b'{"prompt_index": 1', b'{"a": "\xc3'])
def test_a_line_that_a_kill_cut_off_is_no_damage(answers, cut):
    content = answers.read_bytes()
    answers.write_bytes(content + cut)
    assert main(["eval", "--compare", str(answers), str(answers)]) == 0
    assert len(AnswerFile(answers).records) == 8 and answers.read_bytes() == content


def test_answers_to_other_prompts_and_more_than_were_asked_for_are_refused(answers):
    file = AnswerFile(answers)
    file.check_numbers(num_prompts=2, num_answers=4)
    for sizes in ((1, 4), (2, 3)):
        with pytest.raises(UserError, match="choose another --output"):
            file.check_numbers(*sizes)
