"""An answer as it grows, perhaps written by several servers one after another."""

import time
from dataclasses import dataclass, replace

import numpy as np

from megatron_dapo.data.token_arrays import LOG_PROB, TOKEN, VERSION, joined, nothing
from megatron_dapo.servers.client import Generation


@dataclass(eq=False)
class GrowingAnswer:
    """The answer to one question, kept while its request moves from server to server."""

    group: str = ""  # uid of the group; the oldest draw's sorts first
    parts: Generation | None = None  # by earlier servers
    is_moving: bool = False  # its request is to end, and to go on at another server
    moved_from: str = ""  # URL of the server left last
    moved_at: float | None = None  # on the monotonic clock; None: never
    num_given_up: int = 0  # tokens behind the kept ones of a cancelled request

    @property
    def tokens(self) -> np.ndarray:
        """Return the kept tokens, [L]."""
        return nothing(TOKEN) if self.parts is None else self.parts.tokens

    def move(self, part: Generation, url: str) -> None:
        """Leave a server, and keep its aborted part for the next one.

        Its last token is left out: it may end the answer, even if SGLang says "abort", and nothing
        may follow an end. It is left out whatever it is, and drawn anew from the same distribution:
        ends are as frequent as without the move.
        """
        self.moved_from = url
        self.moved_at = time.monotonic()
        if len(part.tokens) > 1:
            tokens, log_probs, versions = part.tokens[:-1], part.log_probs[:-1], part.weight_versions[:-1]
            self.parts = self.whole(replace(part, tokens=tokens, log_probs=log_probs, weight_versions=versions))

    def whole(self, last: Generation) -> Generation:
        """Return the answer with its last part.

        The routers' choices are the last part's: its server has read all the others.
        """
        if self.parts is None:
            return last
        return replace(
            last,
            tokens=joined(TOKEN, self.parts.tokens, last.tokens),
            log_probs=joined(LOG_PROB, self.parts.log_probs, last.log_probs),
            weight_versions=joined(VERSION, self.parts.weight_versions, last.weight_versions),
            servers=tuple(dict.fromkeys((*self.parts.servers, *last.servers))),
        )
