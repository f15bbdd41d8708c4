"""The exit codes of a run's processes, and their names."""

import signal

FAILED_EXIT_CODE = 1
"""Of a process that failed of something that no other code stands for."""

USER_ERROR_EXIT_CODE = 2
"""Of a process that a mistake of the user ended; it has printed the mistake and the cure."""

HANG_EXIT_CODE = 14
"""A rank of a hung job.

It has named the missing ranks, and left its stacks in hang/ of the logs.
"""

MISMATCH_EXIT_CODE = 15
"""A run with log-probs of its servers that disagree with its model.

It is saved without training on that batch.
"""

SAVED_EXIT_CODE = 85
"""A run that was asked to stop. Everything is saved; the same command resumes it."""

_FIRST_SIGNAL = 128


def signal_exit_code(number: int) -> int:
    """Return the exit code that stands for the end by a signal, as shells report it."""
    return _FIRST_SIGNAL + number


def shell_exit_code(returncode: int) -> int:
    """Return the exit code a shell would report for `subprocess`'s return code, which is negative
    after a signal."""
    return returncode if returncode >= 0 else signal_exit_code(-returncode)


def exit_phrase(code: int | None) -> str:
    """Return "ended with exit code 1", "was killed by SIGKILL" or "is still running", for a code of
    `subprocess`."""
    if code is None:
        return "is still running"
    if code >= 0:
        return f"ended with exit code {code}"
    has_name = -code in {number.value for number in signal.Signals}
    return f"was killed by {signal.Signals(-code).name if has_name else f'signal {-code}'}"
