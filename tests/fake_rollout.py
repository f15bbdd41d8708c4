"""A scripted SGLang server on loopback, a tokenizer of whole words, prompts and rewards: for tests
of the rollout."""

import asyncio
import json
import math
import socket
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_dapo.common.rollout_errors import NeedsSync
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import RolloutBatch, Sample
from megatron_dapo.rollout.controller import Controller

EOS = "<eos>"
WORDS = [EOS, "<unk>", "right", "wrong", "right_long", "wrong_long", *(f"p{number}" for number in range(200))]
PLACES = {"num_running_reqs": 0, "max_running_requests": 100}  # of a server's load
PROMPT_LENGTH, SHORT, LONG = 1, 2, 8  # tokens; a long response reaches max_response_length
MIXED, RIGHT, WRONG = ("right", "wrong"), ("right", "right"), ("wrong", "wrong")

REWARD = """
def score(data_source, response, ground_truth, extra_info):
    if response.startswith("wrong") and extra_info.get("crash"):
        raise ValueError("scripted")
    return {"score": float(response.startswith("right")), "correct": response.startswith("right")}
"""


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class Script:
    """The answers of all servers of a test: the responses of each prompt in turn,
    then from the start again.

    delays: seconds before the next answers, in the order of the requests; then none.
    """

    def __init__(self, responses: dict[int, Sequence[str]] | None = None, default: Sequence[str] = MIXED) -> None:
        self.responses = responses or {}
        self.default = default
        self.delays: list[float] = []
        self.num_answers: Counter = Counter()  # prompt number -> answers

    def answer(self, prompt: int) -> str:
        words = self.responses.get(prompt, self.default)
        self.num_answers[prompt] += 1
        return words[(self.num_answers[prompt] - 1) % len(words)]


class FakeServer:
    """Speaks the routes of the controller. `version`: of its weights. Attributes may be changed at
    any time. A request ends with its client's connection, as in SGLang.

    failures: HTTP statuses of the next requests, before it answers again; "abort": a finished
    abort. hold: while it is not set, answers wait. is_frozen: silent about its health too.
    is_paused: as SGLang between pause and continue; it says so, and requests wait. is_ill: SGLang's
    word for itself after too long without a token. num_used_tokens: of the 100 of its cache; None:
    it does not know the question. num_looks: the number of looks at it.
    """

    def __init__(self, script: Script, version: int = 1) -> None:
        self.script, self.version = script, version
        self.failures: list[int | str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.is_frozen = self.is_paused = self.is_ill = False
        self.num_used_tokens: int | None = 0
        self.num_looks = 0
        self.requests: list[dict] = []
        self.num_open = self.max_open = 0
        self._aborted: dict[str, asyncio.Event] = {}  # request -> set when it is to end
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/ready", self._ready),
            web.get("/server_info", self._server_info),
            web.get("/model_info", self._model_info),
            web.get("/v1/loads", self._loads),
            web.get("/health", self._health),
            web.post("/continue_generation", self._continue),
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
        ]

    async def start(self) -> "FakeServer":
        app = web.Application()
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def stop(self) -> None:
        """Close the port and drop all work under way, as a killed server does."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if self.is_paused or self.is_ill else 200)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if self.is_ill else 200)

    async def _continue(self, request: web.Request) -> web.Response:
        self.is_paused = False
        return web.json_response({})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23"})

    async def _model_info(self, request: web.Request) -> web.Response:
        while self.is_frozen:
            await asyncio.sleep(0.05)
        return web.json_response({"weight_version": str(self.version)})

    async def _loads(self, request: web.Request) -> web.Response:
        self.num_looks += 1
        if self.num_used_tokens is None:
            return web.json_response({"error": "scripted"}, status=404)
        load = {"num_used_tokens": self.num_used_tokens, "max_total_num_tokens": 100} | PLACES
        return web.json_response({"loads": [load]})

    async def _generate(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.requests.append(fields)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        request_id = fields["rid"]
        aborted = self._aborted.setdefault(request_id, asyncio.Event())
        try:
            if not await _ends_before(self._turn(), aborted):
                return web.json_response(self._aborted_answer())
            failure = self.failures.pop(0) if self.failures else None
            if isinstance(failure, int):
                return web.json_response({"error": "scripted"}, status=failure)
            return web.json_response(self._answer(fields, aborted=failure == "abort"))
        finally:
            self.num_open -= 1
            self._aborted.pop(request_id, None)

    async def _turn(self) -> None:
        if self.script.delays:
            await asyncio.sleep(self.script.delays.pop())
        await self.hold.wait()
        while self.is_paused:
            await asyncio.sleep(0.02)

    async def _abort(self, request: web.Request) -> web.Response:
        """As SGLang does: end every request with this beginning of its id."""
        beginning = (await request.json())["rid"]
        for request_id, aborted in self._aborted.items():
            if request_id.startswith(beginning):
                aborted.set()
        return web.Response()  # SGLang's answer has no body

    def _aborted_answer(self) -> dict:
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "output_token_logprobs": [],
                "finish_reason": {"type": "abort"},
                "weight_version": str(self.version),
                "weight_versions": [],
            },
        }

    def _answer(self, fields: dict, aborted: bool) -> dict:
        prompt = int(WORDS[fields["input_ids"][0]][1:])
        word = "wrong" if aborted else self.script.answer(prompt)
        is_long = word.endswith("_long")
        tokens = [WORDS.index(word)] * (LONG if is_long else SHORT - 1) + ([] if is_long or aborted else [0])
        reason = "abort" if aborted else "length" if is_long else "stop"
        return {
            "text": "not used",
            "output_ids": tokens,
            "meta_info": {
                "output_token_logprobs": [[-0.5, token, None] for token in tokens],
                "finish_reason": {"type": reason},
                "weight_version": str(self.version),
                "weight_versions": [{"version": str(self.version), "start": 0, "end": len(tokens)}],
            },
        }


async def _ends_before(work: Coroutine, event: asyncio.Event) -> bool:
    """Whether the work ended before the event came, which ends it."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()
        waiting.cancel()


def weights_of(version: int) -> float:
    """The value of a version's weights; versions are mere labels."""
    return 0.001 + (version * 0.6180339887) % 1.0


def mislabelled(sample: Sample) -> list[tuple[int, float]]:
    """The tokens, each as its version and log-prob, from other weights than their version's."""
    pairs = zip(sample.weight_versions.tolist(), sample.rollout_log_probs, strict=True)
    return [(version, log_prob) for version, log_prob in pairs if log_prob != np.float32(-weights_of(version))]


class WritingServer(FakeServer):
    """Writes token by token, at the pace `token_s`; `length` draws the responses' lengths. It may
    be pushed to meanwhile. The log-prob of a token is the negative of its true weights, even under
    a wrong version.

    As SGLang 0.5.23: a response's spans tell its versions. An abort ends every request with this
    beginning of its id, with its tokens so far, or without any while `retract` pauses. A prefix
    once read under the same salt comes from the cache, with the weights of then. Counters tell its
    work, at its nominal pace.

    slowness: factor of its pace; infinite: it answers and writes nothing, and hears no abort.
    """

    def __init__(
        self,
        length: Callable[[], int],
        token_s: float = 0.01,
        version: int = 1,
        word: Callable[[], str] = lambda: "right",
    ) -> None:
        super().__init__(Script(), version)
        self.length, self.token_s, self.word = length, token_s, word
        self.slowness = 1.0
        self.moments = [0.0] * 6  # as SGLang's decode_moments
        self.weights = weights_of(version)
        self.pause_mode = "retract"
        self.cached: dict[tuple[str | None, tuple[int, ...]], float] = {}  # (salt, prefix) -> weights that read it
        self.num_written: Counter = Counter()  # request -> tokens
        # prefixes read by other weights than those of the request's first token
        self.num_old_prefixes = 0

    async def push(self, version: int, seconds: float = 0.02, fails: bool = False) -> None:
        """As the trainer does in two buckets. fails: the second one never comes,
        and the server goes on."""
        self.is_paused = True
        await asyncio.sleep(seconds / 2)
        self.version, self.weights = -1, (self.weights + weights_of(version)) / 2
        await asyncio.sleep(seconds / 2)
        if not fails:
            self.version, self.weights = version, weights_of(version)
            if self.pause_mode == "retract":
                self.cached.clear()
        self.is_paused = False

    async def start(self) -> "WritingServer":
        self.cached.clear()
        await super().start()
        return self

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if self.is_ill or math.isinf(self.slowness) else 200)

    async def _loads(self, request: web.Request) -> web.Response:
        self.num_looks += 1
        work = {"decode_moments": self.moments, "total_prefill_uncached_tokens": len(self.requests), **PLACES}
        return web.json_response({"loads": [{"num_used_tokens": 0, "max_total_num_tokens": 100, **work}]})

    async def _step(self) -> None:
        """Take the time of a step, and count a request's part of it."""
        while math.isinf(self.slowness):
            await asyncio.sleep(self.token_s)
        seconds = self.token_s * self.slowness * (66 + self.num_open) / 67
        await asyncio.sleep(seconds)
        part = (1 / self.num_open, 1.0, 1e6 * seconds / self.num_open, 0.0, 0.0, 1.0)
        self.moments = [before + more for before, more in zip(self.moments, part, strict=True)]

    async def _generate(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.requests.append(fields)
        self.num_open += 1
        aborted = self._aborted.setdefault(fields["rid"], asyncio.Event())
        try:
            return web.json_response(await self._write(fields, aborted))
        finally:
            self.num_open -= 1
            self._aborted.pop(fields["rid"], None)

    async def until_written(self, num_requests: int, num_tokens: int = 5) -> None:
        """Wait for this number of tokens of each of the last requests."""
        await until(lambda: len(self.requests) >= num_requests)
        await until(
            lambda: all(self.num_written[fields["rid"]] >= num_tokens for fields in self.requests[-num_requests:])
        )

    async def _write(self, fields: dict, aborted: asyncio.Event) -> dict:
        key = (fields.get("cache_salt"), tuple(fields["input_ids"]))
        limit = fields["sampling_params"]["max_new_tokens"]
        length = self.length()
        written: list[tuple[int | str, float, int]] = []
        reason = "length" if length > limit else "stop"
        while len(written) < min(length, limit):
            await self._step()
            while self.is_paused and not aborted.is_set():
                await asyncio.sleep(self.token_s)
            if aborted.is_set():
                reason = "abort"
                if self.is_paused and self.pause_mode == "retract":
                    written.clear()
                break
            if not written:
                self.num_old_prefixes += self.cached.setdefault(key, self.weights) != self.weights
            is_last = len(written) == length - 1
            written.append((self.version, -self.weights, 0 if is_last else WORDS.index(self.word())))
            self.num_written[fields["rid"]] += 1
        spans, start = [], 0
        for version, some in groupby(version for version, _, _ in written):
            end = start + len(list(some))
            spans.append({"version": str(version), "start": start, "end": end})
            start = end
        return {
            "output_ids": [token for _, _, token in written],
            "meta_info": {
                "output_token_logprobs": [[log_prob, token, None] for _, log_prob, token in written],
                "finish_reason": {"type": reason},
                "weight_versions": spans,
            },
        }


def write_files(folder: Path, num_prompts: int = 100, num_val: int = 0, extra_info: dict | None = None) -> None:
    """tokenizer, train.jsonl, val.jsonl (prompts p0, p1, ...) and the reward module."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(WORDS)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    for name, count in (("train", num_prompts), ("val", num_val)):
        rows = [
            {"prompt": f"p{number}", "label": "right", "data_source": "fake", "extra_info": extra_info or {}}
            for number in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "fake_rewards.py").write_text(REWARD)


def make_config(folder: Path, servers: Sequence[FakeServer | str], *overrides: str) -> Config:
    """n = 2, batches of 4 prompts in the order of the file, dynamic sampling on; `fake_rewards`
    must be importable."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return load_config(
        None,
        [
            f"data.train_files=[{folder}/train.jsonl]",
            "data.apply_chat_template=false",
            "data.shuffle=false",
            "data.train_batch_size=4",
            "data.max_prompt_length=4",
            f"data.max_response_length={LONG}",
            f"actor_rollout_ref.model.path={folder}",
            "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.rollout.server_urls=[{','.join(urls)}]",
            "actor_rollout_ref.rollout.step_timeout_s=60.0",
            "actor_rollout_ref.rollout.server.startup_timeout_s=60.0",
            "algorithm.dynamic_sampling.enable=true",
            "reward.function=fake_rewards:score",
            "reward.num_workers=1",
            f"trainer.run_dir={folder}/run",
            *overrides,
        ],
    )


def run_with_controller(
    scenario: Callable[[Controller, list[FakeServer]], Awaitable],
    config_for: Callable[[list[FakeServer]], Config],
    num_servers: int,
    script: Script | None = None,
    timeout_s: float = 120,
) -> Any:
    """The result of `await scenario(controller, servers)`, both started; closes all."""

    async def main() -> Any:
        shared = script or Script()
        servers = [await FakeServer(shared).start() for _ in range(num_servers)]
        controller = Controller(config_for(servers))
        try:
            await controller.start()
            return await asyncio.wait_for(scenario(controller, servers), timeout_s)
        finally:
            await controller.close()
            for server in servers:
                await server.stop()

    return asyncio.run(main())


@contextmanager
def server_in_thread(script: Script | None = None) -> Iterator[FakeServer]:
    """A FakeServer with its loop beside the test: the code under test blocks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> FakeServer:
        return await FakeServer(script or Script()).start()

    async def end() -> None:
        await server.stop()
        held = asyncio.all_tasks() - {asyncio.current_task()}
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(make(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def needs_sync(batch: Awaitable[RolloutBatch]) -> bool:
    try:
        await batch
    except NeedsSync:
        return True
    return False


def rollout_folder(folder: Path, monkeypatch: Any) -> Iterator[Path]:
    """The body of a fixture: the folder with prompts and importable rewards,
    for a controller with short waits."""
    write_files(folder, num_val=3)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("megatron_dapo.rollout.sampling._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("megatron_dapo.rollout.build_rollout.PROBE_INTERVAL_S", 0.05)
    yield folder
    sys.modules.pop("fake_rewards", None)


def run_in_folder(
    folder: Path,
    scenario: Callable[[Controller, list[FakeServer]], Awaitable],
    script: Script | None = None,
    num_servers: int = 1,
    overrides: Sequence[str] = (),
) -> Any:
    """`run_with_controller` with the config of `make_config`."""
    return run_with_controller(scenario, lambda servers: make_config(folder, servers, *overrides), num_servers, script)


def prompt_numbers(batch: RolloutBatch) -> list[int]:
    """The numbers of the batch's prompts p0, p1, ..., group by group."""
    return [int(group.prompt.text[1:]) for group in batch.groups]
