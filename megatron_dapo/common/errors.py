"""The error that a user can cure: sentences, not a traceback."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_USER_OF_URL = re.compile(r"(?<=://)[^\s/]+@")


class UserError(ValueError):
    """One or more mistakes of the user, each one sentence that names the key, the value and the cure.

    The command line prints the sentences, one per line, and exits with code 2. details: shown after them as it is, such
    as the traceback of a function of the user's.
    """

    def __init__(self, sentences: str | Iterable[str], details: str = "") -> None:
        texts = [sentences] if isinstance(sentences, str) else sentences
        # a line each, whatever they quote, and never a password that a URL holds
        self.sentences: list[str] = [_USER_OF_URL.sub("***@", " ".join(sentence.split())) for sentence in texts]
        self.details = details
        super().__init__(self.sentences, details)  # its arguments, so that pickle can make it again

    def report(self) -> str:
        """Return what the user is shown: a line with the count, then one line per mistake."""
        num = len(self.sentences)
        details = [self.details.rstrip()] if self.details else []
        return "\n".join([f"{num} mistake{'s' if num != 1 else ''} to correct:", *self.sentences, *details])

    def __str__(self) -> str:
        return "\n".join(self.sentences)


class SharedUserError(UserError):
    """The same on every rank, so that one of them says it."""


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank of the job. host: its node. text: the error on one line."""

    rank: int
    host: str
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.text}"


class SharedError(RuntimeError):
    """An error that is no mistake of the user, raised on every rank alike. step: what the ranks did when it happened;
    failures: of the ranks on which it did, where that is known."""

    def __init__(self, message: str, step: str = "", failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.failures = tuple(failures)


class JobError(SharedError):
    """A part of the job failed on some rank: a full disk, a writer that died."""


class MissingRanksError(RuntimeError):
    """Not all ranks came to a step: there is nobody to agree with on how to go on. missing: who, as far as this rank
    knows."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class RunStopped(Exception):
    """The run was asked to stop, and is saved."""
