"""Health of a server: its states, the events that change them, and the health checks.

Two parties keep a state of each server. The controller (`ServerPool`) decides on the receivers of
requests; it knows servers only by their answers. The supervisor (`ServerSupervisor`) owns the
process and starts it again. They share no memory: the controller leaves a note
(`report_unresponsive`), and the supervisor's `ServerWatch` then waits less long for an answer.
"""

import http.client
from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from typing import NamedTuple
from urllib.parse import urlsplit

HTTP_OK = 200
UNAVAILABLE = 503
"""SGLang's status for a server that fails the check."""


class ServerState(Enum):
    """A server as the controller knows it. Only a current one gets requests."""

    DOWN = "down"  # does not answer, or was not asked yet
    ILL = "ill"  # answers, but takes no requests after it was told to continue
    BEHIND = "behind"  # answers, but needs a push: it holds other weights, or a push left it paused
    CURRENT = "current"  # holds the trainer's weights and takes requests

    def after(self, event: "ServerEvent") -> "ServerState":
        """Return the next state: the same one if the table has no such event."""
        return _STATES[self].get(event, self)


class ServerEvent(Enum):
    """News about a server for the controller, and their source."""

    # no answer: to a request (Sampler), at the start of a step, or to several checks of the watch
    LOST = auto()
    # told to continue, it takes no requests: at the start of a step, or by the watch
    STUCK = auto()
    GENERATED = auto()  # an ill server wrote a token: the watch
    BEHIND = auto()  # other weights, or paused: Sampler, at the start of a step, or by the watch
    READY = auto()  # the trainer's weights, and not paused: at the start of a step, or by the watch


_STATES: Mapping[ServerState, Mapping[ServerEvent, ServerState]] = {
    ServerState.DOWN: {
        ServerEvent.STUCK: ServerState.ILL,
        ServerEvent.BEHIND: ServerState.BEHIND,
        ServerEvent.READY: ServerState.CURRENT,
    },
    # SGLang answers most routes of an ill server as those of a paused one: only a token ends this
    # state
    ServerState.ILL: {ServerEvent.GENERATED: ServerState.DOWN},
    ServerState.BEHIND: {
        ServerEvent.LOST: ServerState.DOWN,
        ServerEvent.STUCK: ServerState.ILL,
        ServerEvent.READY: ServerState.CURRENT,
    },
    ServerState.CURRENT: {
        ServerEvent.LOST: ServerState.DOWN,
        ServerEvent.STUCK: ServerState.ILL,
        ServerEvent.BEHIND: ServerState.BEHIND,
    },
}


class StartState(Enum):
    """A server as its supervisor knows it."""

    STOPPED = "stopped"  # not started yet, stopped, or given up
    STARTING = "starting"  # its process runs and takes no requests yet
    WORKING = "working"  # it took requests; from now on a `ServerWatch` looks after it
    WAITING = "waiting"  # its process ended; the next start is due later

    def after(self, event: "StartEvent") -> "StartState":
        """Return the next state. Raises KeyError for an event that cannot happen."""
        return _START_STATES[self][event]


class StartEvent(Enum):
    """An action of the supervisor on a server, or news about it."""

    STARTED = auto()  # its process was started
    HEALTHY = auto()  # it takes requests for the first time
    ENDED = auto()  # its process died, or was killed because it worked no more
    STOPPED = auto()  # it was stopped, or given up


_START_STATES: Mapping[StartState, Mapping[StartEvent, StartState]] = {
    StartState.STOPPED: {
        StartEvent.STARTED: StartState.STARTING,
        StartEvent.STOPPED: StartState.STOPPED,  # a stop that failed halfway is repeated
    },
    StartState.STARTING: {
        StartEvent.HEALTHY: StartState.WORKING,
        StartEvent.ENDED: StartState.WAITING,
        StartEvent.STOPPED: StartState.STOPPED,
    },
    StartState.WORKING: {StartEvent.ENDED: StartState.WAITING, StartEvent.STOPPED: StartState.STOPPED},
    StartState.WAITING: {StartEvent.STARTED: StartState.STARTING, StartEvent.STOPPED: StartState.STOPPED},
}


class HealthCheck(StrEnum):
    """The routes about a server's health.

    Each docstring gives the meaning of a good answer (200).
    """

    SCHEDULER_ANSWERS = "/server_info"
    """Its scheduler works, also while the server is paused."""

    TAKES_REQUESTS = "/ready"
    """It would begin a request now.

    Status 503: it starts, is paused, or is ill, all alike for SGLang.
    """

    GENERATES = "/health"
    """It has just generated a token.

    Not for a paused server: without an answer SGLang calls it ill.
    """

    GENERATED_LATELY = "/health_generate"
    """Its scheduler and detokenizer have worked since the question.

    Not for a paused server either.
    """


class HttpAnswer(NamedTuple):
    """An answer to a request."""

    status: int
    body: bytes


def http_get(url: str, headers: Mapping[str, str], timeout_s: float) -> HttpAnswer:
    """Send a GET request, through no proxy, and return the answer. Raises OSError without one."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/", headers=dict(headers))
        response = connection.getresponse()
        return HttpAnswer(response.status, response.read())
    except http.client.HTTPException as error:
        raise ConnectionError(" ".join(str(error).split()) or type(error).__name__) from error
    finally:
        connection.close()


def health_status(url: str, check: HealthCheck, headers: Mapping[str, str], timeout_s: float) -> int | None:
    """Return the status of a server's answer to a check; None without an answer."""
    try:
        return http_get(f"{url}{check}", headers, timeout_s).status
    except OSError:
        return None


def is_healthy(url: str, check: HealthCheck, headers: Mapping[str, str], timeout_s: float) -> bool:
    """Return whether a server passes a check."""
    return health_status(url, check, headers, timeout_s) == HTTP_OK
