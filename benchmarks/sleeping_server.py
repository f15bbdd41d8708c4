"""A stand-in for an SGLang server that sleeps for the time of a response, and of a push.

It speaks the routes of `tests.fake_rollout.FakeServer`. A pause stops running requests, and
`resume` goes on with them under the new weights: every token carries the server's version at its
writing. An abort ends a request with its tokens so far; the server that goes on with them has the
same response in mind.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from megatron_dapo.commands.plan.simulation import Draws
from megatron_dapo.servers.fleet import TOKEN_TIME
from tests.fake_rollout import WORDS, FakeServer, Script

_TOKENS_OF_A_LOOK = 15  # after so many a server tells of its work, as SGLang
NUM_PROMPTS = sum(word.startswith("p") for word in WORDS)  # of the vocabulary: p0, p1, ...


class Answers:
    """The answers of all servers of a run.

    The draw with number i is prompt i of the file, again from its start after the last. Its
    requests get the draw's responses in the order of their arrival. A seed stands for a response.
    """

    def __init__(self, draws: Draws, n: int) -> None:
        self._draws = draws
        self._n = n
        self._num_requests: Counter[int] = Counter()  # prompt number -> requests
        self._begun: dict[int, list[int]] = {}  # seed -> tokens, of responses under way

    def rest(self, prompt: int, seed: int, num_written: int) -> list[int]:
        """Return the tokens to write of the seed's response to this prompt."""
        if seed not in self._begun:
            self._begun[seed] = self._next_tokens(prompt)
        return self._begun[seed][num_written:]

    def end(self, seed: int) -> None:
        """Forget a finished response."""
        self._begun.pop(seed, None)

    def _next_tokens(self, prompt: int) -> list[int]:
        """Return the next response to this prompt. With signal the first one of a group is
        wrong."""
        turn, sample = divmod(self._num_requests[prompt], self._n)
        self._num_requests[prompt] += 1
        draw = self._draws(prompt + turn * NUM_PROMPTS)
        word = "wrong" if draw.has_signal and sample == 0 else "right"
        return [WORDS.index(word)] * (draw.lengths[sample] - 1) + [0]  # 0 ends a response


class SleepingServer(FakeServer):
    """One server. Each request takes token_s times `slowness` per token, without the pauses.

    `count` is called with +1 at its beginning and with -1 at its end. `set_slowness`: its speed
    from now on; infinite: it writes nothing.
    """

    def __init__(self, answers: Answers, token_s: float, count: Callable[[int], None]) -> None:
        super().__init__(Script(), version=0)
        self._answers = answers
        self._token_s = token_s
        self._count = count
        self._slowness = 1.0
        self._news = asyncio.Event()  # of a pause, its end, or another speed; the next one
        self._work = [0.0] * 6  # as SGLang's decode_moments

    def pause(self) -> None:
        """Stop running requests."""
        self.is_paused = True
        self._tell()

    def resume(self, version: int) -> None:
        """Go on, with the weights of this version."""
        self.version = version
        self.is_paused = False
        self._tell()

    def set_slowness(self, slowness: float) -> None:
        """Take so many times as long for a token."""
        self._slowness = slowness
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _loads(self, request: web.Request) -> web.Response:
        work = {"decode_moments": self._work, "total_prefill_uncached_tokens": len(self.requests)}
        return web.json_response({"loads": [{"num_used_tokens": 0, "max_total_num_tokens": 1, **work}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if math.isinf(self._slowness) else 200)

    async def _generate(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.requests.append(fields)
        prompt = int(WORDS[fields["input_ids"][0]][1:])
        seed = fields["sampling_params"]["sampling_seed"]
        aborted = self._aborted.setdefault(fields["rid"], asyncio.Event())
        self.num_open += 1
        self._count(+1)
        try:
            tokens = self._answers.rest(prompt, seed, len(fields["input_ids"]) - 1)
            spans = await self._write(len(tokens), aborted)
        finally:
            self.num_open -= 1
            self._count(-1)
            self._aborted.pop(fields["rid"], None)
        num_written = spans[-1]["end"] if spans else 0
        if num_written == len(tokens):
            self._answers.end(seed)
        return web.json_response(
            {
                "output_ids": tokens[:num_written],
                "meta_info": {
                    "output_token_logprobs": [[-0.5, token, None] for token in tokens[:num_written]],
                    "finish_reason": {"type": "stop" if num_written == len(tokens) else "abort"},
                    "weight_version": str(self.version),
                    "weight_versions": spans,
                },
            }
        )

    async def _write(self, num_tokens: int, aborted: asyncio.Event) -> list[dict]:
        """Sleep until the tokens are written, or the request is aborted; return the spans of
        versions."""
        spans: list[dict] = []
        written = 0.0
        start = 0
        while start < num_tokens and not aborted.is_set():
            version, token_s = self.version, math.inf if self.is_paused else self._token_s * self._slowness
            began = time.monotonic()
            await _first_of(self._news, aborted, timeout_s=min(num_tokens - written, _TOKENS_OF_A_LOOK) * token_s)
            written = min(written + (time.monotonic() - began) / token_s, num_tokens)
            # a sleep may end a little early
            end = num_tokens if num_tokens - written < 0.01 else int(written)
            if end > start:
                if not spans or spans[-1]["version"] != str(version):
                    spans.append({"version": str(version), "start": start})
                spans[-1]["end"] = end
                self._note_work(end - start, token_s)
            start = end
        return spans

    def _note_work(self, num_tokens: int, token_s: float) -> None:
        """Count tokens as a server whose steps slow down with its requests as the rules assume,
        though here they do not."""
        step_s = token_s * TOKEN_TIME.token_s(1.0, self.num_open)
        steps = num_tokens / self.num_open
        part = (steps, num_tokens, 1e6 * step_s * steps, 0.0, 0.0, num_tokens)
        self._work = [before + more for before, more in zip(self._work, part, strict=True)]


async def _first_of(*events: asyncio.Event, timeout_s: float) -> None:
    """Return when an event is set, or after timeout_s."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(
            waiting, timeout=None if math.isinf(timeout_s) else timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for task in waiting:
            task.cancel()
