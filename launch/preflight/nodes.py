"""The nodes of a preflight: they meet at a TCPStore on node 0; every wait has a deadline and names
who is missing."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_dapo.common.addresses import LOOPBACK

_POLL_S = 0.05
_LEAVE_S = 15.0  # node 0 holds the store until the others have read the verdict, but not for ever


@dataclass(frozen=True)
class NodeFinding:
    """A check's finding on one node. problem: the fault and the cure, one sentence; None: no
    fault."""

    node: str
    check: str
    found: str
    problem: str | None = None


class PreflightError(Exception):
    """A check that cannot be carried through: a node is missing, or failed in the middle. node: the
    culprit."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(f"{node}: {problem}")
        self.node = node
        self.problem = problem


class PreflightNodes:
    """This node among the others. names: of all, by index; guessed until they are exchanged."""

    def __init__(
        self,
        index: int,
        name: str,
        names: Sequence[str],
        rendezvous: str | None,
        timeout_s: float,
        meeting_timeout_s: float | None = None,
    ) -> None:
        """Join the others.

        Args:
            rendezvous: HOST:PORT of node 0; None: a single node.
            timeout_s: of every wait but the first.
            meeting_timeout_s: of the first wait, which nodes may reach at different times; None:
                timeout_s.

        Raises:
            PreflightError: if node 0 is not reached, or cannot listen.
        """
        self.index = index
        self.name = name
        self.names = [*names]
        self.names[index] = name
        self.timeout_s = timeout_s
        self._meeting_timeout_s = timeout_s if meeting_timeout_s is None else meeting_timeout_s
        host, _, port = (rendezvous or f"{LOOPBACK}:0").rpartition(":")
        self.store = self._connect(host.strip("[]"), int(port))
        self.store.set_timeout(timedelta(seconds=timeout_s))
        self.address = (host.strip("[]"), self.store.port)

    @property
    def count(self) -> int:
        return len(self.names)

    def meet(self, value: Any) -> list:
        """Do the first `gather`."""
        return self.gather("the meeting", value, self._meeting_timeout_s)

    def gather(self, what: str, value: Any, timeout_s: float | None = None) -> list:
        """Return every node's value for `what`, in order; JSON-able. Raises PreflightError, naming
        absent nodes, or at once if another node reported a failure."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.store.set(f"{what}/{self.index}", json.dumps(value))
        keys = [f"{what}/{index}" for index in range(self.count)]
        deadline = time.monotonic() + timeout_s
        while missing := [index for index, key in enumerate(keys) if not self.store.check([key])]:
            if self.store.check(["stop"]):
                raise PreflightError(*json.loads(self.store.get("stop")))
            if time.monotonic() > deadline:
                raise self.stop(", ".join(self.names[index] for index in missing), self._missing(what, timeout_s))
            time.sleep(_POLL_S)
        return [json.loads(self.store.get(key)) for key in keys]

    def stop(self, node: str, problem: str) -> PreflightError:
        """Have all other nodes end their waits with this problem; the error to raise here."""
        error = PreflightError(node, problem)
        self.store.set("stop", json.dumps([node, problem]))
        return error

    def leave(self) -> None:
        """Tell the other nodes that this one leaves; node 0 goes last.

        Raises nothing, because the verdict is already known.
        """
        try:
            self.store.set(f"left/{self.index}", "1")
            deadline = time.monotonic() + _LEAVE_S
            keys = [f"left/{index}" for index in range(self.count)]
            while self.index == 0 and not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except dist.DistError:  # node 0 is gone, and with it the store
            return

    def _missing(self, what: str, timeout_s: float) -> str:
        host, port = self.address
        return (
            f"not heard of within {timeout_s:g} s at `{what}`; look at its log, and whether it reaches "
            f"{self.names[0]} at {host}:{port}."
        )

    def _connect(self, host: str, port: int) -> dist.TCPStore:
        try:
            return dist.TCPStore(
                host,
                port,
                is_master=self.index == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._meeting_timeout_s),
            )
        except dist.DistError as error:
            if self.index == 0:
                cause = str(error).splitlines()[0]
                raise PreflightError(
                    self.name, f"cannot listen on {host}:{port} ({cause}); give another port."
                ) from None
            raise PreflightError(
                self.name,
                f"{self.names[0]} (node 0) is not reached at {host}:{port} within {self._meeting_timeout_s:g} s; is it "
                "up, does its name resolve here, and does a firewall let the port through?",
            ) from None
