"""Many trajectories of agents at once, through real gateways and workers, beside a scripted server.

No token is lost or counted twice, and the controller's event loop stays free. In `make proofs` 1000
trajectories of 10 turns; the costs are printed (docs/agents.md has them).
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

import numpy as np
import psutil
import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_dapo.data.samples import Branch, RolloutBatch
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import FakeServer, Script, make_config
from tests.proofs import PROOFS, amount

pytestmark = pytest.mark.e2e

NUM_TRAJECTORIES, TURNS, GROUP_SIZE = amount(64, 1000), 10, 8
ANSWER = 60  # words of an answer
ANSWER_S = (1.0, 7.0) if PROOFS else (0.05, 0.35)  # to write them
LONG_TURN_S, FREE_SHARE = 0.050, 0.999
EOS, ROLES = "<eos>", ("<system>", "<user>", "<assistant>")
WORDS = [EOS, "<unk>", *ROLES, *(f"p{number}" for number in range(200))]
FIRST = WORDS.index("p0")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_model(folder: Path) -> None:
    """A tokenizer of whole words with a chat template, and as many prompts as a step has."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS, *ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(WORDS)}))
    settings = {"eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = (
        {
            "prompt": [{"role": "user", "content": f"p{number // 200} p{number % 200}"}],
            "label": "",
            "data_source": "load",
        }
        for number in range(NUM_TRAJECTORIES // GROUP_SIZE)
    )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbered(number: int) -> list[int]:
    """The tokens of an answer: its number in three words, then other words, then the end."""
    digits = [number // 40_000, number // 200 % 200, number % 200]
    return [FIRST + digit for digit in (*digits, *range(ANSWER - 4))] + [0]


def log_probs_of(number: int) -> np.ndarray:
    return -((number + np.arange(ANSWER)) % 997 + 1).astype(np.float32) / 1024


def digest(tokens: list[int]) -> str:
    return hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()


class NumberingServer(FakeServer):
    """Numbers its answers. The first ones come when as many are asked for: all trajectories are open."""

    def __init__(self, num_open: int) -> None:
        super().__init__(Script())
        self.prompts: list[str] = []  # by the number of the answer
        self._numbers = count()
        self._num_first = num_open
        self._all_are_open = asyncio.Event()

    async def _generate(self, request: web.Request) -> web.Response:
        fields = await request.json()
        number = next(self._numbers)
        self.prompts.append(digest(fields["input_ids"]))
        if number == self._num_first - 1:
            self._all_are_open.set()
        await self._all_are_open.wait()
        await asyncio.sleep(random.Random(number).uniform(*ANSWER_S))
        tokens = numbered(number)
        scored = [[float(value), token, None] for value, token in zip(log_probs_of(number), tokens, strict=True)]
        spans = [{"version": "1", "start": 0, "end": len(tokens)}]
        meta = {"output_token_logprobs": scored, "finish_reason": {"type": "stop"}, "weight_versions": spans}
        return web.json_response({"output_ids": tokens, "meta_info": {"weight_version": "1", **meta}})


def serve(pipe: Connection, num_open: int) -> None:
    """Send the URL; when asked, the digests of the prompts so far."""

    async def main() -> None:
        server = await NumberingServer(num_open).start()
        pipe.send(server.url)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(server.prompts)

    asyncio.run(main())


@contextmanager
def served(num_open: int) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """A server in a process of its own: its URL, and a question for its prompts."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=serve, args=(far, num_open), daemon=True)
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
def timed_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """CPU seconds of this thread in each turn of the event loop, without its waiting."""
    turns: list[float] = []
    run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed(loop: asyncio.BaseEventLoop) -> None:
        began = time.thread_time()
        run_once(loop)
        turns.append(time.thread_time() - began)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "_run_once", timed)
        yield turns


def gateways() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "megatron_dapo.agents.gateway_process" in child.cmdline()]


def cpu_s(*processes: psutil.Process) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def memory_mb(*processes: psutil.Process) -> float:
    return sum(process.memory_info().rss for process in processes) / 1e6


def counted_answers(row: Branch, prompts: list[str]) -> Iterator[int]:
    """Numbers of the answers that count in a row; each as the server wrote it, behind the prompt that it
    read."""
    tokens = [*row.prompt_tokens.tolist(), *row.response_tokens.tolist()]
    masks = np.concatenate([np.zeros(len(row.prompt_tokens), int), row.loss_mask])
    offset = len(row.prompt_tokens)
    starts = np.flatnonzero(np.diff(masks, prepend=0) == 1)
    assert masks.sum() == ANSWER * len(starts)
    for start in starts.tolist():
        high, middle, low = (token - FIRST for token in tokens[start : start + 3])
        number = 40_000 * high + 200 * middle + low
        assert tokens[start : start + ANSWER] == numbered(number)
        assert masks[start : start + ANSWER].all()
        assert np.array_equal(row.rollout_log_probs[start - offset :][:ANSWER], log_probs_of(number))
        assert digest(tokens[:start]) == prompts[number]
        yield number


def test_many_open_trajectories_lose_no_token_and_leave_the_controller_free(tmp_path, monkeypatch):
    write_model(tmp_path)
    num_turns = NUM_TRAJECTORIES * TURNS
    agent = "actor_rollout_ref.rollout.agent"
    costs: dict[str, float] = {}

    async def step(url: str) -> RolloutBatch:
        controller = Controller(
            make_config(
                tmp_path,
                [url],
                "data.apply_chat_template=true",
                f"data.train_batch_size={NUM_TRAJECTORIES // GROUP_SIZE}",
                "data.max_prompt_length=16",
                f"data.max_response_length={TURNS * (ANSWER + 8)}",
                f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
                f"actor_rollout_ref.rollout.max_concurrency={NUM_TRAJECTORIES}",
                "actor_rollout_ref.rollout.step_timeout_s=3000.0",
                "algorithm.dynamic_sampling.enable=false",
                "reward.function=environment",
                f"{agent}.enable=true",
                f"{agent}.function=tests.load_agent:play",
                f"{agent}.kwargs.turns={TURNS}",
                f"{agent}.kwargs.pause_s=0.1",
                f"{agent}.num_workers=2",
                f"{agent}.max_open={NUM_TRAJECTORIES}",
                f"{agent}.max_turns={TURNS}",
            )
        )
        try:
            await controller.start()
            here, others = psutil.Process(), gateways()
            assert len(others) == 1
            gc.collect()
            gc.freeze()  # as the controller's process does
            before = cpu_s(here), cpu_s(*others), memory_mb(here), memory_mb(*others), time.monotonic()
            with timed_turns(monkeypatch) as turns:
                batch = await controller.next_batch(1, weight_version=1)
            after = cpu_s(here), cpu_s(*others), memory_mb(here), memory_mb(*others), time.monotonic()
            names = "controller_s", "gateway_s", "controller_mb", "gateway_mb", "seconds"
            costs.update({name: new - old for name, old, new in zip(names, before, after, strict=True)})
            costs["free_share"] = float(np.mean(np.array(turns) < LONG_TURN_S))
            costs["longest_turn_s"] = max(turns)
            return batch
        finally:
            gc.unfreeze()
            await controller.close()

    with served(NUM_TRAJECTORIES) as (url, prompts):
        batch = asyncio.run(step(url))
        asked = prompts()
    samples = [sample for group in batch.groups for sample in group.samples]
    assert len(samples) == NUM_TRAJECTORIES and len(asked) == num_turns
    assert [sample.reward_error for sample in samples if sample.reward_error] == []
    assert {len(sample.branches) for sample in samples} == {1}
    found = Counter(number for sample in samples for row in sample.branches for number in counted_answers(row, asked))
    assert found == Counter(range(num_turns)), "answers lost, or counted twice"
    print(
        f"\n{NUM_TRAJECTORIES} trajectories of {TURNS} turns in {costs['seconds']:.1f} s; CPU of a turn: gateway "
        f"{1e3 * costs['gateway_s'] / num_turns:.2f} ms, controller {1e3 * costs['controller_s'] / num_turns:.2f} ms; "
        f"memory of an open trajectory: gateway {1e3 * costs['gateway_mb'] / NUM_TRAJECTORIES:.0f} kB, controller "
        f"{1e3 * costs['controller_mb'] / NUM_TRAJECTORIES:.0f} kB; turns of the event loop below 50 ms: "
        f"{costs['free_share']:.3%}, the longest {1e3 * costs['longest_turn_s']:.0f} ms"
    )
    assert costs["free_share"] >= FREE_SHARE
