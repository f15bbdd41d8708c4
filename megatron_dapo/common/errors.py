"""The error that a user can cure: sentences, not a traceback."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_USER_OF_URL = re.compile(r"(?<=://)[^\s/]+@")


class UserError(ValueError):
    """One or more mistakes of the user, each one sentence that names the key, the value and the
    cure.

    The command line prints the sentences, one per line, and exits with code 2. details: shown after
    them as it is, such as the traceback of a function of the user's.
    """

    def __init__(self, sentences: str | Iterable[str], details: str = "") -> None:
        texts = [sentences] if isinstance(sentences, str) else sentences
        # one line each, without passwords in URLs
        self.sentences: list[str] = [_USER_OF_URL.sub("***@", " ".join(sentence.split())) for sentence in texts]
        self.details = details
        super().__init__(self.sentences, details)  # its arguments, for pickle

    def report(self) -> str:
        """Return the text for the user: a line with the count, then one line per mistake."""
        num = len(self.sentences)
        details = [self.details.rstrip()] if self.details else []
        return "\n".join([f"{num} mistake{'s' if num != 1 else ''} to correct:", *self.sentences, *details])

    def __str__(self) -> str:
        return "\n".join(self.sentences)


class SharedUserError(UserError):
    """The same mistake on every rank; one of them reports it."""


@dataclass(frozen=True)
class RankFailure:
    """The error of one rank of the job."""

    rank: int
    host: str
    """Its node."""
    text: str
    """The error on one line."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.text}"


class SharedError(RuntimeError):
    """An error outside the user's mistakes, raised on all ranks alike.

    Args:
        step: the operation that failed.
        failures: one per failed rank, as far as known.
    """

    def __init__(self, message: str, step: str = "", failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.failures = tuple(failures)


class JobError(SharedError):
    """A part of the job failed on some rank: a full disk, a writer that died."""


class MissingRanksError(RuntimeError):
    """Not all ranks came to a step, so that no agreement is possible. missing: the absent ones, as
    far as this rank knows."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class RunStopped(Exception):
    """The run was asked to stop and saved its state."""
