"""A stand-in for an SGLang server that sleeps for the time of a response, and of a push.

It speaks the routes of `tests.fake_rollout.FakeServer`. A pause stops running requests, and
`resume` goes on with them under the new weights: every token carries the server's version at its
writing. An abort ends a request with its tokens so far; the server that goes on with them has the
same response in mind. A server that was stopped may start again, without weights of ours.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from megatron_dapo.commands.plan.simulated_server import Machines
from megatron_dapo.commands.plan.simulation import Draws
from megatron_dapo.servers.client import FOREIGN_VERSION
from megatron_dapo.servers.fleet import TOKEN_TIME
from tests.fake_rollout import WORDS, FakeServer, Script

_PART = 0.01  # of a token: clocks are not exact
NUM_PROMPTS = sum(word.startswith("p") for word in WORDS)  # of the vocabulary: p0, p1, ...


def token_seconds(full_s: float, slots: int) -> dict[str, float]:
    """Return the fields of `Machines` for a server that slows down with its requests as the rules
    assume. full_s: seconds of a token with all slots in use."""
    unit = full_s / TOKEN_TIME.token_s(1.0, slots)
    return {"token_s": unit * TOKEN_TIME.base, "token_s_per_request": unit * TOKEN_TIME.per_request}


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
    """One server. With r requests it takes token_s + r * token_s_per_request for a token of each.

    That is times its slowness (`set_slowness`; infinite: it writes nothing), and without the
    pauses. `count` is called with +1 at a request's beginning and with -1 at its end.
    """

    def __init__(self, answers: Answers, machines: Machines, count: Callable[[int], None]) -> None:
        super().__init__(Script(), version=0)
        self._answers = answers
        self._machines = machines
        self._count = count
        self._slowness = 1.0
        self._since = time.monotonic()
        self._num_steps = 0.0  # until then; each wrote a token of every request
        self._ends: dict[str, float] = {}  # request -> steps at its end
        self._alarm: asyncio.TimerHandle | None = None  # at the next end
        self._pushes = [(0.0, self.version)]  # (steps before, version)
        self._work = [0.0] * 6  # as SGLang's decode_moments

    async def stop(self) -> None:
        """Lose all work and the weights, as a killed server does. It may be started again."""
        await super().stop()
        self.version = FOREIGN_VERSION

    @property
    def is_started(self) -> bool:
        """Return whether it listens."""
        return self._runner is not None

    def pause(self) -> None:
        """Stop running requests."""
        with self._changed():
            self.is_paused = True

    def resume(self, version: int) -> None:
        """Go on, with the weights of this version."""
        with self._changed():
            self.version = version
            self._pushes.append((self._num_steps, version))
            self.is_paused = False

    def set_slowness(self, slowness: float) -> None:
        """Take so many times as long for a token."""
        with self._changed():
            self._slowness = slowness

    @property
    def _step_s(self) -> float:
        """Return the seconds of a step; infinite while it writes nothing."""
        if self.is_paused or not self._ends:
            return math.inf
        return self._slowness * (self._machines.token_s + len(self._ends) * self._machines.token_s_per_request)

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Write until now; after the change go on until the next request ends."""
        self._write()
        yield
        if self._alarm:
            self._alarm.cancel()
        if math.isfinite(self._step_s):
            seconds = (min(self._ends.values()) - self._num_steps) * self._step_s
            self._alarm = asyncio.get_running_loop().call_later(seconds, self._end_requests)

    def _write(self) -> None:
        """Take the steps until now, and count their work."""
        step_s, num_requests, now = self._step_s, len(self._ends), time.monotonic()
        if math.isfinite(step_s):
            steps = (now - self._since) / step_s
            part = (steps, steps * num_requests, 1e6 * (now - self._since), 0.0, 0.0, steps * num_requests)
            self._work = [before + more for before, more in zip(self._work, part, strict=True)]
            self._num_steps += steps
        self._since = now

    def _end_requests(self) -> None:
        """End the finished requests."""
        with self._changed():
            for request in [request for request, end in self._ends.items() if end - self._num_steps < _PART]:
                del self._ends[request]
                self._aborted[request].set()

    async def _loads(self, request: web.Request) -> web.Response:
        self._write()
        work = {"decode_moments": self._work, "total_prefill_uncached_tokens": len(self.requests)}
        places = {"num_running_reqs": len(self._ends), "max_running_requests": 4096}
        return web.json_response({"loads": [{"num_used_tokens": 0, "max_total_num_tokens": 1, **places, **work}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if math.isinf(self._slowness) else 200)

    async def _generate(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.requests.append(fields)
        prompt = int(WORDS[fields["input_ids"][0]][1:])
        name, seed = fields["rid"], fields["sampling_params"]["sampling_seed"]
        tokens = self._answers.rest(prompt, seed, len(fields["input_ids"]) - 1)
        over = self._aborted.setdefault(name, asyncio.Event())
        with self._changed():
            began = self._num_steps
            self._ends[name] = began + len(tokens)
        self._count(+1)
        try:
            await over.wait()
        finally:
            with self._changed():
                self._ends.pop(name, None)
            self._count(-1)
            del self._aborted[name]
        num_written = min(int(self._num_steps - began + _PART), len(tokens))
        if num_written == len(tokens):
            self._answers.end(seed)
        return web.json_response(
            {
                "output_ids": tokens[:num_written],
                "meta_info": {
                    "output_token_logprobs": [[-0.5, token, None] for token in tokens[:num_written]],
                    "finish_reason": {"type": "stop" if num_written == len(tokens) else "abort"},
                    "weight_version": str(self.version),
                    "weight_versions": self._spans(began, num_written),
                },
            }
        )

    def _spans(self, began: float, num_tokens: int) -> list[dict]:
        """Return the versions of so many tokens since this step."""
        starts = [min(max(round(steps - began), 0), num_tokens) for steps, _ in self._pushes]
        return [
            {"version": str(version), "start": start, "end": end}
            for (_, version), start, end in zip(self._pushes, starts, [*starts[1:], num_tokens], strict=True)
            if end > start
        ]
