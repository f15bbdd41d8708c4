"""The file of an evaluation's answers, one per line: it grows answer by answer, and a kill costs none of them."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.rollout.records import answer_line


class AnswerFile:
    """The answers that there are, and the file to which new ones are added. One process at a time has it."""

    def __init__(self, path: Path) -> None:
        """Read what is there. A line that a kill cut off is removed; one that lacks only its end gets it."""
        self.path = path
        self._file: BinaryIO | None = None
        content = path.read_bytes() if path.exists() else b""
        lines = content.splitlines(keepends=True)
        self.records = [record for record in map(_record, lines) if record is not None]
        if len(self.records) < len(lines) or content[-1:] not in (b"", b"\n"):
            self._write()

    def add(self, record: dict[str, Any]) -> None:
        """Add an answer, so that it is there when this process is killed. Raises OSError, and adds nothing of it, where
        it cannot be written."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        try:
            rest = answer_line(record)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.records.append(record)

    def drop_failed(self) -> None:
        """Remove the answers without a verdict, so that they are asked for again, and number those that stay anew."""
        kept = [record for record in self.records if "reward_error" not in record]
        numbers: Counter[int] = Counter()
        for record in kept:
            record["number"] = numbers[record["prompt_index"]]
            numbers[record["prompt_index"]] += 1
        self.records = kept
        self.close()
        self._write()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        write_whole(self.path, b"".join(map(answer_line, self.records)))


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Return the answers of a file, or of the folder of an evaluation. Raises UserError where there are none."""
    file = path / "answers.jsonl" if path.is_dir() else path
    try:
        records = [record for record in map(_record, file.read_bytes().splitlines()) if record is not None]
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); give the folder of an evaluation, or a file of kept answers."
        ) from error
    if not records:
        raise UserError(f"{file} has no answers; give the folder of an evaluation, or a file of kept answers.")
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, None where it is not whole."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "prompt_index" in record and "number" in record else None
