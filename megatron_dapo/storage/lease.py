"""The lease of shared GPUs: who has them, trainer or servers, and which servers must end.

One per run with `hybrid_engine`. Rank 0 writes it; the servers' supervisors, and the controller's
watch over servers, read it. A supervisor answers each change with its servers that have no process
left: dead ones hold no memory.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_dapo.common.files import write_whole

_HOLDER = "holder.json"
_MAX_BYTES = 2**20


class Holder(StrEnum):
    """Who may take memory of the GPUs."""

    SERVERS = "servers"  # they sample, start and start again
    MOVING = "moving"  # neither: memory changes hands
    TRAINER = "trainer"  # servers sleep or are dead


@dataclass(frozen=True)
class Lease:
    """The state of the lease."""

    holder: Holder = Holder.SERVERS
    turn: int = 0
    """Grows with every change."""
    condemned: tuple[str, ...] = ()
    """URLs of servers whose processes must be killed."""


class LeaseFolder:
    """The files of a run's lease; see `RunFolder.lease`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, holder: Holder, condemned: Collection[str] = ()) -> Lease:
        """Change the lease; return it. Only rank 0 calls this. Raises OSError."""
        lease = Lease(holder, self.read().turn + 1, tuple(condemned))
        fields = {"holder": lease.holder, "turn": lease.turn, "condemned": lease.condemned}
        write_whole(self._path / _HOLDER, json.dumps(fields))
        return lease

    def read(self) -> Lease:
        """Return the lease: of the servers if none was written. Raises ValueError for a damaged
        file."""
        fields = _read(self._path / _HOLDER)
        if fields is None:
            return Lease()
        return Lease(Holder(fields["holder"]), int(fields["turn"]), tuple(map(str, fields["condemned"])))

    def answer(self, supervisor: str, turn: int, gone: Collection[str]) -> None:
        """Say, as a supervisor, which of its servers have no process left at this turn."""
        name = re.sub(r"[^\w.-]+", "_", supervisor)
        write_whole(self._path / f"answer-{name}.json", json.dumps({"turn": turn, "gone": list(gone)}))

    def gone(self, turn: int) -> set[str]:
        """Return the servers without a process, by the supervisors that have answered this turn or a
        later one."""
        answers = filter(None, map(_read, self._path.glob("answer-*.json")))
        return {str(url) for answer in answers if int(answer["turn"]) >= turn for url in answer["gone"]}


def _read(path: Path) -> dict | None:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no lease: {content[:80]!r}")
    return fields
