"""metrics.jsonl: one record per line, read although parts of it are damaged, and written although
the disk is full."""

import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.common.bounded import parse_json, read_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30  # of a file: a run of 200 000 steps
MAX_STEP = 10**9


def records_of(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[tuple[bytes, dict | None]]:
    """Yield each whole line and its record.

    The record is None for a broken line, as a full disk or a loss of power leaves it. An unfinished
    last line is left out.

    Raises:
        FileNotFoundError: without the file.
        OSError: if it is larger than max_bytes or unreadable.
    """
    for line in io.BytesIO(read_bytes(path, max_bytes)):
        if not line.endswith(b"\n"):
            return
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        yield line, record if isinstance(record, dict) and is_step(record.get("step")) else None


def is_step(value: Any) -> bool:
    """Return whether this is the number of a step that a run can have."""
    return type(value) is int and 0 <= value <= MAX_STEP


class MetricsFile:
    """Appends lines, each whole or not at all. A line that cannot be written is kept for the next
    attempt."""

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        """Make the file, or remove broken lines and the records of steps after last_step from an
        old one (None: keep all records). Raises UserError if the file cannot be made."""
        self._path = path
        self._unwritten = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            _clean(path, last_step)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}); free some space, or choose another "
                f"trainer.run_dir."
            ) from error

    def append(self, line: str) -> None:
        """Write the line at the end of the file. Raises OSError if it cannot be written now."""
        self._unwritten += line.encode("utf-8") + b"\n"
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                rest = self._unwritten
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
        self._unwritten = b""


def _clean(path: Path, last_step: int | None) -> None:
    records = list(records_of(path))
    if num_damaged := sum(record is None for _, record in records):
        log.warning("%s: %d damaged lines are removed", path, num_damaged)
    kept = [line for line, record in records if record and (last_step is None or record["step"] <= last_step)]
    content = b"".join(kept)
    if len(content) < path.stat().st_size:
        write_whole(path, content)
