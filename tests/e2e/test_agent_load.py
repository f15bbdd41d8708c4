"""Many trajectories of agents at once, through real gateways and workers, beside a scripted server.

No token is lost or counted twice, and the controller's event loop stays free. In `make proofs` 1000
trajectories of 10 turns, and 200 with long ones; docs/agents.md has the costs that are printed.
"""

import asyncio
import gc
import hashlib
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Branch, RolloutBatch
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import FakeServer, Script, make_config
from tests.proofs import PROOFS

pytestmark = pytest.mark.e2e

TURNS, GROUP_SIZE = 10, 8
ANSWER_S = (1.0, 7.0) if PROOFS else (0.05, 0.35)  # to write an answer


class Load(NamedTuple):
    """Trajectories that are open at once, and the words of an answer."""

    num: int
    words: int


LOADS = [Load(1000, 60), Load(200, 2000)] if PROOFS else [Load(64, 60)]
LONG_TURN_S, FREE_SHARE = 0.050, 0.999
EOS, ROLES = "<eos>", ("<system>", "<user>", "<assistant>")
WORDS = [EOS, "<unk>", *ROLES, *(f"p{number}" for number in range(200))]
FIRST = WORDS.index("p0")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_model(folder: Path, num_prompts: int) -> None:
    """A tokenizer of whole words with a chat template, and as many prompts as a step has."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS, *ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = model_json_named("qwen2.5-0.5b") | {"vocab_size": len(WORDS)}
    (folder / "config.json").write_text(json.dumps(shape))
    settings = {"eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = (
        {
            "prompt": [{"role": "user", "content": f"p{number // 200} p{number % 200}"}],
            "label": "",
            "data_source": "load",
        }
        for number in range(num_prompts)
    )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbered(number: int, length: int) -> list[int]:
    """The tokens of an answer: its number in three words, then other words, then the end."""
    digits = [number // 40_000, number // 200 % 200, number % 200]
    return [FIRST + digit for digit in (*digits, *(place % 200 for place in range(length - 4)))] + [0]


def log_probs_of(number: int, length: int) -> np.ndarray:
    return -((number + np.arange(length)) % 997 + 1).astype(np.float32) / 1024


def digest(tokens: list[int]) -> str:
    return hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()


class NumberingServer(FakeServer):
    """Numbers its answers. The first ones come when as many are asked for: all trajectories are open."""

    def __init__(self, load: Load) -> None:
        super().__init__(Script())
        self.prompts: list[str] = []  # by the number of the answer
        self._numbers = count()
        self._load = load
        self._all_are_open = asyncio.Event()

    async def _generate(self, request: web.Request) -> web.Response:
        fields = await request.json()
        number = next(self._numbers)
        self.prompts.append(digest(fields["input_ids"]))
        if number == self._load.num - 1:
            self._all_are_open.set()
        await self._all_are_open.wait()
        await asyncio.sleep(random.Random(number).uniform(*ANSWER_S))
        tokens, log_probs = numbered(number, self._load.words), log_probs_of(number, self._load.words)
        scored = [[log_prob, token, None] for log_prob, token in zip(log_probs.tolist(), tokens, strict=True)]
        spans = [{"version": "1", "start": 0, "end": len(tokens)}]
        meta = {"output_token_logprobs": scored, "finish_reason": {"type": "stop"}, "weight_versions": spans}
        return web.json_response({"output_ids": tokens, "meta_info": {"weight_version": "1", **meta}})


def serve(pipe: Connection, load: Load) -> None:
    """Send the URL; when asked, the digests of the prompts so far."""

    async def main() -> None:
        server = await NumberingServer(load).start()
        pipe.send(server.url)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(server.prompts)

    asyncio.run(main())


@contextmanager
def served(load: Load) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """A server in a process of its own: its URL, and a question for its prompts."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=serve, args=(far, load), daemon=True)
    process.start()
    far.close()

    def prompts() -> list[str]:
        near.send(True)
        return near.recv()

    try:
        assert near.poll(60), "the server did not start"
        yield near.recv(), prompts
    finally:
        near.send(False)
        process.join(30)


@contextmanager
def timed_turns(turns: list[float]) -> Iterator[None]:
    """Add this thread's CPU seconds in each turn of the event loop."""
    run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed(loop: asyncio.BaseEventLoop) -> None:
        began = time.thread_time()
        run_once(loop)
        turns.append(time.thread_time() - began)

    with patch.object(asyncio.BaseEventLoop, "_run_once", timed):
        yield


def counted_answers(row: Branch, prompts: list[str], length: int) -> Iterator[int]:
    """Numbers of the answers that count in a row; each as the server wrote it, behind the prompt that it
    read."""
    tokens = [*row.prompt_tokens.tolist(), *row.response_tokens.tolist()]
    masks = np.concatenate([np.zeros(len(row.prompt_tokens), int), row.loss_mask])
    offset = len(row.prompt_tokens)
    starts = np.flatnonzero(np.diff(masks, prepend=0) == 1)
    assert masks.sum() == length * len(starts)
    for start in starts.tolist():
        high, middle, low = (token - FIRST for token in tokens[start : start + 3])
        number = 40_000 * high + 200 * middle + low
        assert tokens[start : start + length] == numbered(number, length)
        assert masks[start : start + length].all()
        log_probs = row.rollout_log_probs[start - offset :][:length]
        assert np.array_equal(log_probs, log_probs_of(number, length))
        assert digest(tokens[:start]) == prompts[number]
        yield number


def config_of(load: Load, folder: Path, url: str) -> Config:
    agent = "actor_rollout_ref.rollout.agent"
    return make_config(
        folder,
        [url],
        "data.apply_chat_template=true",
        f"data.train_batch_size={load.num // GROUP_SIZE}",
        "data.max_prompt_length=16",
        f"data.max_response_length={TURNS * (load.words + 8)}",
        f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
        f"actor_rollout_ref.rollout.max_concurrency={load.num}",
        "actor_rollout_ref.rollout.step_timeout_s=3000.0",
        "algorithm.dynamic_sampling.enable=false",
        "reward.function=environment",
        f"{agent}.enable=true",
        f"{agent}.function=tests.load_agent:play",
        f"{agent}.kwargs.turns={TURNS}",
        f"{agent}.kwargs.pause_s=0.1",
        f"{agent}.num_workers=2",
        f"{agent}.max_open={load.num}",
        f"{agent}.max_turns={TURNS}",
    )


class Costs(NamedTuple):
    """CPU seconds and megabytes so far."""

    controller_s: float
    gateway_s: float
    controller_mb: float
    gateway_mb: float

    @classmethod
    def now(cls, gateway: psutil.Process) -> "Costs":
        both = (psutil.Process(), gateway)
        return cls(*(sum(one.cpu_times()[:2]) for one in both), *(one.memory_info().rss / 1e6 for one in both))


async def step_with_costs(config: Config, turns: list[float]) -> tuple[RolloutBatch, Costs]:
    """Return the batch of a step, and its costs; add the CPU seconds of the event loop's turns."""
    controller = Controller(config)
    try:
        await controller.start()
        children = psutil.Process().children(recursive=True)
        (gateway,) = (child for child in children if "megatron_dapo.agents.gateway_process" in child.cmdline())
        gc.collect()
        gc.freeze()  # as the controller's process does
        before = Costs.now(gateway)
        with timed_turns(turns):
            batch = await controller.next_batch(1, weight_version=1)
        return batch, Costs(*(new - old for new, old in zip(Costs.now(gateway), before, strict=True)))
    finally:
        gc.unfreeze()
        await controller.close()


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.num} open")
def test_many_open_trajectories_lose_no_token_and_leave_the_controller_free(load, tmp_path):
    write_model(tmp_path, load.num // GROUP_SIZE)
    turns: list[float] = []
    with served(load) as (url, prompts):
        batch, costs = asyncio.run(step_with_costs(config_of(load, tmp_path, url), turns))
        asked = prompts()
    num_turns = load.num * TURNS
    samples = [sample for group in batch.groups for sample in group.samples]
    assert len(samples) == load.num and len(asked) == num_turns
    assert [sample.reward_error for sample in samples if sample.reward_error] == []
    rows = [row for sample in samples for row in sample.branches]
    assert len(rows) == load.num, "no conversation was broken off"
    counted = Counter(number for row in rows for number in counted_answers(row, asked, load.words))
    assert counted == Counter(range(num_turns)), "answers lost, or counted twice"
    share = float(np.mean(np.array(turns) < LONG_TURN_S))
    print(f"\n{load.num} trajectories of {TURNS} turns of {load.words} words")
    for name, seconds, mb in (
        ("gateway", costs.gateway_s, costs.gateway_mb),
        ("controller", costs.controller_s, costs.controller_mb),
    ):
        print(
            f"{name}: {1e3 * seconds / num_turns:.2f} ms of CPU per turn, {1e3 * mb / load.num:.0f} kB per trajectory"
        )
    print(
        f"{share:.3%} of the event loop's turns below {1e3 * LONG_TURN_S:.0f} ms, the longest {1e3 * max(turns):.0f} ms"
    )
    assert share >= FREE_SHARE
