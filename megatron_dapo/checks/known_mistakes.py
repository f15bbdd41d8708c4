"""What a check is: a function of the config that yields one sentence for each mistake of the user.

It reads what it needs and nothing more. Where it reads a value that was refused, it ends: what follows from that value
is not known. So rules that read different keys are different checks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from megatron_dapo.config.schema.base import Refused

Check = Callable[..., Iterator[str]]


def known_mistakes(checks: Iterable[Check], *arguments: object) -> Iterator[str]:
    """Yield the mistakes that checks find in what is known."""
    for check in checks:
        with suppress(Refused):
            yield from check(*arguments)
