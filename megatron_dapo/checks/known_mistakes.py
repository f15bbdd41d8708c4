"""Checks: functions of the config, each yielding one sentence per mistake of the user.

A check reads only the values it needs, and ends at a refused one: the rest would be a guess. So
rules on different keys are different checks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from megatron_dapo.config.schema.base import Refused

Check = Callable[..., Iterator[str]]


def known_mistakes(checks: Iterable[Check], *arguments: object) -> Iterator[str]:
    """Yield the mistakes among the known values."""
    for check in checks:
        with suppress(Refused):
            yield from check(*arguments)
