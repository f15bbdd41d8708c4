"""Chooses the answers in a page: all if they fit, else those of steps at equal distances."""

import base64
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dapo.commands.report.answers import (
    HELD_OUT,
    TRAINED,
    StepFile,
    answer_files,
    num_answers,
    texts_bytes,
    tokens_bytes,
)

# of all answers in a page, which stays below 30 MB with the script of the charts
MAX_BYTES = 23_000_000
_HELD_OUT_SHARE = 0.3  # the most of the bytes, if a run has trained answers too
_MOST_PACKED = 16  # no file of answers shrinks more than this, for the choice of files to read
_MOST_STEPS = 2000  # with answers of a kind: more are as slow to read as they are small
_TEXTS_SHARE = 0.6  # of the bytes, if texts and tokens do not both fit


@dataclass(frozen=True)
class StepAnswers:
    """The answers of a step in a page."""

    file: StepFile
    num_groups: int
    num_answers: int
    texts: str = ""
    """Encoded; empty if left out."""
    tokens: str = ""
    """Encoded; empty if left out."""


def packed(content: bytes) -> str:
    """Return bytes as a page carries them: zlib, base64."""
    return base64.b64encode(zlib.compress(content, 6)).decode("ascii")


def _read_answers(file: StepFile, max_bytes: int) -> StepAnswers | None:
    """Return the answers of a step, or None.

    Of an evaluation too large by itself, only answers to its first prompts.
    """
    groups = file.groups()
    if not groups:
        return None
    texts = packed(texts_bytes(groups))
    while file.kind == HELD_OUT and len(texts) > max_bytes and len(groups) > 1:
        groups = groups[: len(groups) // 2]
        texts = packed(texts_bytes(groups))
    tokens = tokens_bytes(file, groups)
    return StepAnswers(file, len(groups), num_answers(groups), texts, packed(tokens) if tokens else "")


def answers_of(folders: Sequence[Path], max_bytes: int = MAX_BYTES) -> list[list[StepAnswers]]:
    """Return, for every run, the answers that its page carries, by step. Runs have equal parts of
    max_bytes."""
    return [_of_run(answer_files(folder), max_bytes // len(folders)) for folder in folders]


def _of_run(files: Sequence[StepFile], max_bytes: int) -> list[StepAnswers]:
    """Return the answers of a run: held-out ones up to a share, and trained ones in the rest."""
    kinds = {kind: [file for file in files if file.kind == kind] for kind in (HELD_OUT, TRAINED)}
    held_out = _carried(kinds[HELD_OUT], int(max_bytes * _HELD_OUT_SHARE) if kinds[TRAINED] else max_bytes)
    trained = _carried(kinds[TRAINED], max_bytes - sum(len(each.texts) for each in held_out))
    return sorted([*trained, *held_out], key=lambda each: (each.file.step, each.file.kind == HELD_OUT))


def _carried(files: Sequence[StepFile], max_bytes: int) -> list[StepAnswers]:
    """Return the answers of one kind that fit. Steps too many by the size of their files are never
    read."""
    sizes = [max(file.num_bytes() // _MOST_PACKED, max_bytes // _MOST_STEPS) for file in files]
    places = _thinned(sizes, max_bytes)
    answers = [_read_answers(files[place], max_bytes) for place in places]
    return fitting([each for each in answers if each is not None], max_bytes)


def fitting(answers: Sequence[StepAnswers], max_bytes: int) -> list[StepAnswers]:
    """Return the answers of steps at equal distances, with the first and the last, and with tokens
    if these fit too. A single step is included even if it is too large."""
    texts_share = 1.0 if not any(each.tokens for each in answers) else _TEXTS_SHARE
    total = sum(len(each.texts) + len(each.tokens) for each in answers)
    if total <= max_bytes:
        return [*answers]
    with_texts = _thinned([len(each.texts) for each in answers], int(max_bytes * texts_share))
    kept = [answers[number] for number in with_texts]
    left = max_bytes - sum(len(each.texts) for each in kept)
    with_tokens = set(_thinned([len(each.tokens) for each in kept], left))
    return [each if number in with_tokens else replace(each, tokens="") for number, each in enumerate(kept)]


def _thinned(sizes: Sequence[int], max_bytes: int) -> list[int]:
    """Return indices at equal distances, about the most that fit: at least the last one."""
    last = len(sizes) - 1

    def places(number: int) -> list[int]:
        return sorted({last - round(place * last / max(1, number - 1)) for place in range(number)})

    numbers = range(1, len(sizes) + 1)
    most = bisect_right(numbers, max_bytes, key=lambda number: sum(sizes[place] for place in places(number)))
    return places(max(1, most)) if sizes else []
