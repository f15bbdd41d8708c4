"""Reads the error of a dead process from its log, for lack of a better record."""

import re
from collections.abc import Sequence
from pathlib import Path

_ERROR = re.compile(r"^(\[rank\d+\]: )?((\w+\.)*\w*(Error|Exception|Failure|Interrupt|Exit)\b.*|Fatal Python error.*)$")


def read_lines(log: Path, start: int = 0) -> list[str]:
    """Return the lines of a log from byte `start` on; [] without a file."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", errors="replace").splitlines()


def last_error(lines: Sequence[str]) -> str:
    """Return the last line that names a Python error; else the last non-empty line."""
    errors = [line for line in lines if _ERROR.match(line)]
    candidates = errors or [line for line in lines if line.strip()]
    return re.sub(r"^\[rank\d+\]: ", "", candidates[-1]).strip() if candidates else ""
