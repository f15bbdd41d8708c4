"""One process that searches texts: only its end can stop a search. `python -m
megatron_dapo.rewards.pattern_worker`.

A request {"text": ...} is answered by {"match": first group of the last match, or null}.
"""

import re
from functools import partial

from megatron_dapo.rewards.worker_process import Answer, Message, serve

_MATCH_CHARS = 100


def _get_ready(settings: Message) -> tuple[Message, Answer]:
    """Return the greeting, and the function that answers a request. settings: with `pattern`."""
    return {}, partial(_last_match, re.compile(settings["pattern"]))


def _last_match(pattern: re.Pattern[str], message: Message) -> Message:
    last = None
    for match in pattern.finditer(message["text"]):
        last = match.group(1)
    return {"match": None if last is None else last[:_MATCH_CHARS]}


if __name__ == "__main__":
    serve(_get_ready)
