"""What a server can be asked about its health, what an answer means, and the request itself."""

import http.client
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import urlsplit

HTTP_OK = 200
UNAVAILABLE = 503
"""SGLang's status for a server that does not do what the check asks of it."""


class HealthCheck(StrEnum):
    """The routes of a server that say how well it is, each with what a good answer (status 200) proves."""

    SCHEDULER_ANSWERS = "/server_info"
    """Its scheduler works, also while the server is paused."""

    TAKES_REQUESTS = "/ready"
    """It would begin a request now. Status 503: it starts, is paused, or is ill; SGLang does not tell these apart."""

    GENERATES = "/health"
    """It has just generated a token. Not for a paused server: SGLang calls one ill that does not answer this."""

    GENERATED_LATELY = "/health_generate"
    """Its scheduler and detokenizer have done something since the question. Not for a paused server either."""


class HttpAnswer(NamedTuple):
    """The answer to a request: its status, and the body."""

    status: int
    body: bytes


def http_get(url: str, headers: Mapping[str, str], timeout_s: float) -> HttpAnswer:
    """Send a GET request, through no proxy, and return the answer.

    Raises:
        OSError: where no answer came in time.
    """
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
    """Return the status with which a server answers a check; none where it does not answer."""
    try:
        return http_get(f"{url}{check}", headers, timeout_s).status
    except OSError:
        return None


def is_healthy(url: str, check: HealthCheck, headers: Mapping[str, str], timeout_s: float) -> bool:
    """Return whether a server passes a check."""
    return health_status(url, check, headers, timeout_s) == HTTP_OK
