"""What a log says of the end of the process that wrote it, where nothing else does."""

import re
from collections.abc import Sequence
from pathlib import Path

_ERROR = re.compile(r"^(\[rank\d+\]: )?((\w+\.)*\w*(Error|Exception|Failure|Interrupt|Exit)\b.*|Fatal Python error.*)$")


def read_lines(log: Path) -> list[str]:
    """Return the lines of a log; none where there is no such file."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []


def last_error(lines: Sequence[str]) -> str:
    """Return the last line that names a Python error; else the last line that is not empty."""
    errors = [line for line in lines if _ERROR.match(line)]
    candidates = errors or [line for line in lines if line.strip()]
    return re.sub(r"^\[rank\d+\]: ", "", candidates[-1]).strip() if candidates else ""
