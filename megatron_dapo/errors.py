"""The error that a user can cure: sentences, not a traceback; and how processes end."""

import signal
from collections.abc import Iterable

SAVED_EXIT_CODE = 85
"""Of a run that was asked to stop: everything is saved, the same command goes on from there."""
HANG_EXIT_CODE = 14
"""Of a rank whose job hung: it has said who is missing, and left its stacks in hang/ of the logs."""


class UserError(ValueError):
    """One or more mistakes of the user, each one sentence that names the key, the value and the cure.

    The command line prints the sentences, one per line, and exits with code 2.
    """

    def __init__(self, sentences: str | Iterable[str]) -> None:
        given = [sentences] if isinstance(sentences, str) else sentences
        self.sentences: list[str] = [
            " ".join(sentence.split()) for sentence in given
        ]  # a line each, whatever they quote
        super().__init__(self.sentences)  # the one argument, so that the error survives pickling between processes

    def report(self) -> str:
        """What the user is shown: a line with the count, then one line per mistake."""
        num = len(self.sentences)
        return "\n".join([f"{num} mistake{'s' if num != 1 else ''} to correct:", *self.sentences])

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def exit_phrase(code: int | None) -> str:
    """ "ended with exit code 1", "was killed by SIGKILL", "is still running"."""
    if code is None:
        return "is still running"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
