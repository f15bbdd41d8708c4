"""The file of an evaluation's answers, one per line: it grows answer by answer, and a kill costs none of them."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.rollout.records import answer_line


class AnswerFile:
    """The answers that there are, and the file to which new ones are added. One process at a time has it."""

    def __init__(self, path: Path) -> None:
        """Read what is there. A line that a kill cut off is removed."""
        self.path = path
        self._file: BinaryIO | None = None
        content = path.read_bytes() if path.exists() else b""
        lines = content.splitlines(keepends=True)
        self.records = [record for record in map(_record, lines) if record is not None]
        if len(self.records) < len(lines):
            self._write()

    def add(self, record: dict[str, Any]) -> None:
        """Add an answer, so that it is there when this process is killed."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        self.records.append(record)
        self._file.write(answer_line(record))

    def num_of_prompts(self) -> Counter[int]:
        """Return prompt's index -> its answers."""
        return Counter(record["prompt_index"] for record in self.records)

    def drop(self, is_dropped: Callable[[Mapping[str, Any]], bool]) -> int:
        """Remove answers, and number those that stay anew. Returns how many were removed."""
        kept = [record for record in self.records if not is_dropped(record)]
        num_dropped = len(self.records) - len(kept)
        numbers: Counter[int] = Counter()
        for record in kept:
            record["number"] = numbers[record["prompt_index"]]
            numbers[record["prompt_index"]] += 1
        self.records = kept
        self.close()
        self._write()
        return num_dropped

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
