"""Values of a run's files as the page takes them: of the right kind and size, or not at all."""

from typing import Any

_MAX = 1e100  # sums and squares of such numbers are finite
_MAX_TIME = 1e11  # seconds since 1970: browsers' calendars end soon after


def number(value: Any) -> float | None:
    """Return a number that can be calculated with; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX
    return value if is_number else None


def time_of(value: Any) -> float | None:
    """Return seconds since 1970; None for an invalid time."""
    seconds = number(value)
    return seconds if seconds is not None and 0 < seconds < _MAX_TIME else None


def signed(text: str) -> str:
    """Return a number's text with a true minus, and a zero without one."""
    return (text if text.strip("-0.") else text.removeprefix("-")).replace("-", "\u2212")


def counted(count: Any, noun: str) -> str:
    """Return a count with its noun, of which one has no s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
