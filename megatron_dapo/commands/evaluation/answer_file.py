"""The file of an evaluation's answers, one per line: it grows answer by answer, and a kill costs
none of them."""

import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron_dapo.common.bounded import parse_json, read_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.rollout.answer_records import line_of

_MAX_BYTES = 8 << 30  # of a file: all answers are held in memory
_MAX_SHOWN = 40  # characters of a wrong value


class AnswerFile:
    """The existing answers, and the file for new ones. One process at a time uses it."""

    def __init__(self, path: Path) -> None:
        """Read existing answers.

        A last line cut off by a kill is removed; if only its newline is missing, it gets one.

        Raises:
            UserError: for any other invalid line, and for a repeated answer.
        """
        self.path = path
        self._file: BinaryIO | None = None
        content = _content(path) if path.exists() else b""
        self.records = list(_records(content, path))
        if content.count(b"\n") != len(self.records) or content[-1:] not in (b"", b"\n"):
            self._write()

    def add(self, record: dict[str, Any]) -> None:
        """Add an answer, safe from a kill of this process. Raises OSError, without adding part of
        it, if writing fails."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        try:
            rest = line_of(record)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.records.append(record)

    def drop_failed(self) -> None:
        """Remove the answers without a verdict, so that they are sampled again."""
        self.records = [record for record in self.records if "reward_error" not in record]
        self.close()
        self._write()

    def check_numbers(self, num_prompts: int, num_answers: int) -> None:
        """Raise UserError for answers to other prompts, or more than num_answers to one."""
        numbers = Counter(record["prompt_index"] for record in self.records)
        for prompt, number in sorted(numbers.items()):
            if prompt >= num_prompts or number > num_answers:
                raise UserError(
                    f"{self.path} has {number} answers to prompt {prompt}, but {num_answers} are asked for to each of "
                    f"{num_prompts} prompts; choose another --output."
                )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        write_whole(self.path, b"".join(map(line_of, self.records)))


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Return the answers of a file, or of an evaluation's folder, without a last line cut off by a
    kill.

    Raises:
        UserError: without answers, for an invalid line, and for a repeated answer.
    """
    file = path / "answers.jsonl" if path.is_dir() else path
    records = list(_records(_content(file), file))
    if not records:
        raise UserError(f"{file} has no answers; give the folder of an evaluation, or a file of kept answers.")
    return records


def _content(file: Path) -> bytes:
    try:
        return read_bytes(file, _MAX_BYTES)
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); give the folder of an evaluation, or a file of kept answers."
        ) from error


def _records(content: bytes, file: Path) -> Iterator[dict[str, Any]]:
    lines: dict[tuple[int, int], int] = {}
    for number, line in enumerate(io.BytesIO(content), 1):
        place = f"{file}, line {number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                return
            raise UserError(f"{place}: this is no JSON ({error}); remove the line.") from error
        _check(record, place)
        first = lines.setdefault((record["prompt_index"], record["number"]), number)
        if first != number:
            raise UserError(
                f"{place}: answer {record['number']} to prompt {record['prompt_index']} is in line {first} already; "
                f"remove one of the two, or everything after it if a file was appended to itself."
            )
        yield record


def _check(record: Any, place: str) -> None:
    """Raise UserError if a record lacks fields for the figures."""
    if not isinstance(record, dict):
        raise UserError(f"{place}: this is no answer, but {_shown(record)}; remove the line.")
    for name, (what, fits) in _FIELDS.items():
        if name not in record:
            raise UserError(f"{place}: the answer has no `{name}`; remove the line, or give a file of kept answers.")
        if not fits(record[name]):
            raise UserError(f"{place}: `{name}` is {_shown(record[name])} and not {what}; remove the line.")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_null(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt_index": ("a count", _is_count),
    "number": ("a count", _is_count),
    "prompt_key": ("text", _is_text),
    "prompt": ("text", _is_text),
    "data_source": ("text or null", _is_text_or_null),
    "answer": ("text or null", _is_text_or_null),
    "correct": ("true or false", lambda value: isinstance(value, bool)),
    "raw_reward": ("a finite number", _is_finite),
    "num_tokens": ("a count", _is_count),
    "finish_reason": ("text", _is_text),
}
