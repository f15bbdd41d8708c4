"""Errors of a call to a server."""

from megatron_dapo.storage.server_key import CURE

BODY_HEAD = 600
"""Characters of an answer in an error."""


class ServerError(RuntimeError):
    """A server refused, failed, did not answer in time, or gave a senseless answer."""

    def __init__(self, url: str, route: str, status: int | None, body: str) -> None:
        self.url = url
        self.route = route
        self.status = status  # of HTTP; None without an answer
        self.body = body[:BODY_HEAD]
        # all arguments, so that the error survives pickling
        super().__init__(url, route, status, self.body)

    def __str__(self) -> str:
        answer = "no answer" if self.status is None else f"HTTP {self.status}"
        return f"server {self.url}, {self.route}: {answer}: {self.body}"


class KeyRefused(ServerError):
    """A server demands a key: another one than it was sent, or any."""

    def __str__(self) -> str:
        return f"server {self.url} {self.body} ({self.route}: HTTP {self.status}); {CURE}."
