"""The error that a user can cure: sentences, not a traceback."""

import re
from collections.abc import Iterable

_USER_OF_URL = re.compile(r"(?<=://)[^\s/]+@")


class UserError(ValueError):
    """One or more mistakes of the user, each one sentence that names the key, the value and the cure.

    The command line prints the sentences, one per line, and exits with code 2. details: shown after them as it is, such
    as the traceback of a function of the user's.
    """

    def __init__(self, sentences: str | Iterable[str], details: str = "") -> None:
        given = [sentences] if isinstance(sentences, str) else sentences
        # a line each, whatever they quote, and never a password that a URL holds
        self.sentences: list[str] = [_USER_OF_URL.sub("***@", " ".join(sentence.split())) for sentence in given]
        self.details = details
        super().__init__(self.sentences, details)  # its arguments, so that pickle can make it again

    def report(self) -> str:
        """What the user is shown: a line with the count, then one line per mistake."""
        num = len(self.sentences)
        details = [self.details.rstrip()] if self.details else []
        return "\n".join([f"{num} mistake{'s' if num != 1 else ''} to correct:", *self.sentences, *details])

    def __str__(self) -> str:
        return "\n".join(self.sentences)


class SharedUserError(UserError):
    """The same on every rank, so that one of them says it."""


class RunStopped(Exception):
    """The run was asked to stop, and is saved."""
