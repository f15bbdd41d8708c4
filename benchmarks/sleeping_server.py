"""A stand-in for an SGLang server that sleeps for the time of a response, and of a push.

It speaks the routes of `tests.fake_rollout.FakeServer`. A pause stops running requests, and
`resume` goes on with them under the new weights: every token carries the server's version at its
writing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from megatron_dapo.commands.plan.simulation import Draws
from tests.fake_rollout import WORDS, FakeServer, Script

NUM_PROMPTS = sum(word.startswith("p") for word in WORDS)  # of the vocabulary: p0, p1, ...


class Answers:
    """The answers of all servers of a run.

    The draw with number i is prompt i of the file, again from its start after the last. Its
    requests get the draw's responses in the order of their arrival.
    """

    def __init__(self, draws: Draws, n: int) -> None:
        self._draws = draws
        self._n = n
        self._num_requests: Counter[int] = Counter()  # prompt number -> requests

    def next_tokens(self, prompt: int) -> list[int]:
        """Return the response to the next request for this prompt.

        With signal the first one of a group is wrong.
        """
        turn, sample = divmod(self._num_requests[prompt], self._n)
        self._num_requests[prompt] += 1
        draw = self._draws(prompt + turn * NUM_PROMPTS)
        word = "wrong" if draw.has_signal and sample == 0 else "right"
        return [WORDS.index(word)] * (draw.lengths[sample] - 1) + [0]  # 0 ends a response


class SleepingServer(FakeServer):
    """One server. Each request takes token_s per token, without the pauses.

    `count` is called with +1 at its beginning and with -1 at its end.
    """

    def __init__(self, answers: Answers, token_s: float, count: Callable[[int], None]) -> None:
        super().__init__(Script(), version=0)
        self._answers = answers
        self._token_s = token_s
        self._count = count
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._paused = asyncio.Event()

    def pause(self) -> None:
        """Stop running requests."""
        self.is_paused = True
        self._resumed.clear()
        self._paused.set()

    def resume(self, version: int) -> None:
        """Go on, with the weights of this version."""
        self.version = version
        self.is_paused = False
        self._paused.clear()
        self._resumed.set()

    async def _generate(self, request: web.Request) -> web.Response:
        fields = await request.json()
        prompt = int(WORDS[fields["input_ids"][0]][1:])
        self._count(+1)
        try:
            tokens = self._answers.next_tokens(prompt)
            spans = await self._write(len(tokens))
        finally:
            self._count(-1)
        return web.json_response(
            {
                "output_ids": tokens,
                "meta_info": {
                    "output_token_logprobs": [[-0.5, token, None] for token in tokens],
                    "finish_reason": {"type": "stop"},
                    "weight_version": str(self.version),
                    "weight_versions": spans,
                },
            }
        )

    async def _write(self, num_tokens: int) -> list[dict]:
        """Sleep until the tokens are written; return the spans of versions."""
        spans: list[dict] = []
        seconds_left = num_tokens * self._token_s
        start = 0
        while start < num_tokens:
            await self._resumed.wait()
            version = self.version
            began = time.monotonic()
            await _wait_for(self._paused, seconds_left)
            seconds_left -= time.monotonic() - began
            end = num_tokens - max(round(seconds_left / self._token_s), 0)
            if end > start:
                spans.append({"version": str(version), "start": start, "end": end})
            start = end
        return spans


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Return when the event is set, or after timeout_s."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
