"""How the processes of a run ended: each writes a record, RUN/ends/WHO.json, for others to act on.

The kinds and codes of these records decide restarts and the job's exit code; the wording of a
message or log never does.
"""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from megatron_dapo.common.addresses import node_name
from megatron_dapo.common.errors import MissingRanksError
from megatron_dapo.common.exit_codes import (
    FAILED_EXIT_CODE,
    HANG_EXIT_CODE,
    MISMATCH_EXIT_CODE,
    SAVED_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    exit_phrase,
    shell_exit_code,
)
from megatron_dapo.common.files import write_whole

FOLDER_VARIABLE = "MEGATRON_DAPO_ENDS"
START_VARIABLE = "MEGATRON_DAPO_START"

# messages of torch, gloo and NCCL in a rank that lost its peer
PEER_IS_GONE = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Broken pipe|NCCL|DistBackendError|DistNetworkError|[Tt]imed out"
    r"|heartbeat"
)


_WRITE_S = 5.0  # storage may hang, and no end waits for it


class EndKind(StrEnum):
    """The cause of a process's end."""

    DONE = "done"
    """It finished its work, or ended on request."""
    SAVED = "saved"
    """The run was asked to stop and saved its state."""
    USER_ERROR = "user_error"
    """A mistake of the user; the sentence names it."""
    SERVERS_LOST = "servers_lost"
    """No server of the run answers any more."""
    ROLLOUT_FAILED = "rollout_failed"
    """Sampling failed for good of something else."""
    MISMATCH = "mismatch"
    """The servers' log-probs disagree with the trainer's model."""
    HANG = "hang"
    """The watchdog ended a job that made no progress."""
    PEER_LOST = "peer_lost"
    """Another process of the job was gone; never the first cause if another process reports a
    different one."""
    TERMINATED = "terminated"
    """SIGTERM, as launchers send it to the peers of a process that failed: never the first cause
    either."""
    KILLED = "killed"
    """Another signal; the process could not write its record, its launcher wrote it."""
    FAILED = "failed"
    """Any other error."""

    @property
    def is_good(self) -> bool:
        """Return whether the process ended as intended."""
        return self in (EndKind.DONE, EndKind.SAVED)

    @property
    def is_consequence(self) -> bool:
        """Return whether this end follows from the end of another process."""
        return self in (EndKind.PEER_LOST, EndKind.TERMINATED)


_KIND_OF_CODE = {
    0: EndKind.DONE,
    USER_ERROR_EXIT_CODE: EndKind.USER_ERROR,
    HANG_EXIT_CODE: EndKind.HANG,
    MISMATCH_EXIT_CODE: EndKind.MISMATCH,
    SAVED_EXIT_CODE: EndKind.SAVED,
}
_SIGTERM = 15
_STOP = "asked_to_stop"


@dataclass(frozen=True)
class End:
    """The end of one process."""

    kind: EndKind
    exit_code: int
    """As a shell reports it: 137 after SIGKILL."""
    sentence: str = ""
    """The error on one line; empty if the process could not report it."""
    host: str = field(default_factory=node_name)
    step: int | None = None
    """The rollout step at that moment; None outside steps."""
    start: str = ""
    """The start of the run that this process was part of."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""


class EndFolder:
    """The records of one start of a run. Records that an earlier start left in the folder are not
    seen."""

    def __init__(self, path: str | Path, start: str) -> None:
        """Open the records of a start.

        Args:
            path: `RunFolder.ends`.
            start: identifies this start of the run.
        """
        self.path = Path(path)
        self.start = start

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "EndFolder | None":
        """Return the folder that the launcher of this process named; None if it was started by
        hand."""
        path = environment.get(FOLDER_VARIABLE)
        return cls(path, environment.get(START_VARIABLE, "")) if path else None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that name this folder to a child process."""
        return {FOLDER_VARIABLE: str(self.path), START_VARIABLE: self.start}

    def write(self, who: str, end: End) -> None:
        """Write the record of a process. Raises OSError."""
        write_whole(self._file(who), json.dumps({**asdict(end), "start": self.start}, indent=1) + "\n")

    def read(self, who: str) -> End | None:
        """Return the end of a process of this start; None if it is running, or left no record."""
        try:
            fields = json.loads(self._file(who).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if fields["start"] != self.start:
            return None
        return End(**{**fields, "kind": EndKind(fields["kind"])})

    def note_stop(self, reason: str) -> None:
        """Note the launcher's reason to stop, before it passes it on as SIGTERM. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        note = json.dumps({"reason": reason, "start": self.start}) + "\n"
        # not flushed: a busy disk must not delay the stop
        (self.path / _STOP).write_text(note, encoding="utf-8")

    def stop_reason(self) -> str | None:
        """Return the reason of the request to this start's launcher to stop, or None."""
        try:
            fields = json.loads((self.path / _STOP).read_text(encoding="utf-8"))
            return str(fields["reason"]) if fields["start"] == self.start else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget(self, who: str) -> None:
        """Remove the record of a restarted process."""
        self._file(who).unlink(missing_ok=True)

    def _file(self, who: str) -> Path:
        return self.path / f"{who}.json"


def end_of_code(returncode: int) -> End:
    """Return the end of a process by its return code.

    The code has the form of `subprocess`: negative after a signal.
    """
    if returncode >= 0:
        return End(_KIND_OF_CODE.get(returncode, EndKind.FAILED), returncode)
    kind = EndKind.TERMINATED if -returncode == _SIGTERM else EndKind.KILLED
    return End(kind, shell_exit_code(returncode), exit_phrase(returncode))


def end_of_error(error: BaseException) -> End:
    """Return the end of a process that this error ends."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return end_of_code(code)
    lines = traceback.format_exception_only(error)
    # a syntax error begins with its position; other errors continue with notes
    sentence = " ".join(lines[-1 if isinstance(error, SyntaxError) else 0].split())
    is_peer_gone = isinstance(error, MissingRanksError) or PEER_IS_GONE.search(sentence)
    kind = EndKind.PEER_LOST if is_peer_gone else EndKind.FAILED
    return End(kind, FAILED_EXIT_CODE, sentence)


def rank_name(rank: int) -> str:
    """Return the name of a rank of the trainer in the records, and in the names of its files."""
    return f"trainer-rank-{rank}"


# ------------------------------------------------------------------------------------- this process


class _ThisProcess:
    """The record of this process's own end, written once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.folder: EndFolder | None = None
        self.who = ""
        self.step: int | None = None
        self.has_ended = False


_this_process = _ThisProcess()


def forget_this_process() -> None:
    """Begin anew, for a process that runs several programs in turn, as tests do."""
    global _this_process
    _this_process = _ThisProcess()


def begin(who: str, folder: EndFolder | None) -> None:
    """Name this process and the folder of its record; remove an old record of the same name and
    start.

    Does nothing without a folder, or if the launcher named one already.
    """
    if folder is None or _this_process.folder is not None:
        return
    _this_process.who = who
    _this_process.folder = folder
    try:
        if folder.read(who) is not None:
            folder.forget(who)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{folder.path} cannot be written: {error}", file=sys.stderr)


def begin_step(step: int) -> None:
    """Note the rollout step that this process is in, for its record."""
    _this_process.step = step


def record_end(kind: EndKind, exit_code: int, sentence: str = "") -> None:
    """Write how this process ends, the first time only; nothing before `begin`.

    Never raises OSError, and takes seconds at most: a full disk or hanging storage must not delay
    an end.
    """
    write_own_end(End(kind, exit_code, " ".join(sentence.split())))


def write_own_end(end: End) -> None:
    """Do the same as `record_end`, with a complete `End`."""
    with _this_process.lock:
        if _this_process.folder is None or _this_process.has_ended:
            return
        _this_process.has_ended = True
    fields = {**asdict(end), "step": _this_process.step}
    arguments = (_this_process.folder, _this_process.who, End(**fields))
    writer = threading.Thread(target=_write_or_say, args=arguments, daemon=True)
    writer.start()
    writer.join(_WRITE_S)


def _write_or_say(folder: EndFolder, who: str, end: End) -> None:
    try:
        folder.write(who, end)
    except OSError as error:
        print(f"How this process ended cannot be written to {folder.path}: {error}", file=sys.stderr)


def own_folder() -> EndFolder | None:
    """Return the folder that a launcher named to this process."""
    return EndFolder.of_environment(os.environ)
