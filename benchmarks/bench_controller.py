"""One controller beside many servers: its share of a core at a given rate of tokens.

It shows whether one controller can feed the trainer. The controller is the program's own, at
`max_staleness` 1. The servers are stand-ins in a process of their own. They answer with rendered
text of the length and size of SGLang's. Each writes `--rate` tokens a second in all. The trainer
takes a step as soon as it is ready. Rewards and the decoding of responses to text are part of the
work.

With `--streams` it shows instead what answers that come in events of so many tokens would cost, the
whole answers of the program (0) beside them.

python -m benchmarks.bench_controller [--quick] [--servers N,...] [--rate TOKENS_PER_S]
    [--streams TOKENS,...] [--seconds S] [--json FILE]
"""

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from aiohttp import web
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.report import plain_table, written
from benchmarks.streamed_answers import StreamedClient, StreamedServer
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.servers.client import SGLangClient
from tests.fake_rollout import EOS, WORDS, FakeServer, Script, make_config, write_files

VOCABULARY = 150_000
LONGEST = 20_480
SIGMA = 0.8  # of the logarithm of the lengths
NUM_DISTINCT = 64  # answers; requests get one of them
GROUP_SIZE = 16
SEED = 1


@dataclass(frozen=True)
class Load:
    """The work of the servers."""

    num_servers: int
    rate: float  # tokens per second of each
    slots: int  # requests at once on each
    mean_tokens: int  # of an answer
    step_groups: int  # groups of a step
    seconds: float  # of the measurement
    streamed: int  # tokens of an event; 0: whole answers


@dataclass(frozen=True)
class Answer:
    """The part of an answer common to all requests."""

    num_tokens: int
    text: bytes

    def body(self, version: int) -> bytes:
        """Return the whole answer, with every token written by these weights."""
        spans = f'"weight_version":"{version}","weight_versions":[{{"version":"{version}","start":0,"end":'
        return self.text + spans.encode() + f"{self.num_tokens}}}]}}}}".encode()


def render_answers(mean_tokens: int) -> list[Answer]:
    """Return answers of log-normal lengths with ids of a large vocabulary.

    Their log-probs are printed as float32.
    """
    chooser = random.Random(SEED)
    answers = []
    for number in range(NUM_DISTINCT):
        length = int(mean_tokens * chooser.lognormvariate(-SIGMA * SIGMA / 2, SIGMA))
        length = min(max(length, 2), LONGEST)
        tokens = [WORDS.index("right" if number % 2 else "wrong")]
        tokens += [chooser.randrange(len(WORDS), VOCABULARY) for _ in range(length - 2)] + [WORDS.index(EOS)]
        log_probs = torch.tensor([-chooser.expovariate(1.0) for _ in tokens]).tolist()
        scored = [[log_prob, token, None] for log_prob, token in zip(log_probs, tokens, strict=True)]
        fields = {"output_token_logprobs": scored, "finish_reason": {"type": "stop"}}
        text = json.dumps({"output_ids": tokens, "meta_info": fields}, separators=(",", ":"))
        answers.append(Answer(length, text.removesuffix("}}").encode() + b","))
    return answers


class RenderedServer(FakeServer):
    """Answers each request with one of the rendered answers, after the time of its tokens."""

    def __init__(self, answers: Sequence[Answer], token_s: float) -> None:
        super().__init__(Script(), version=0)
        self._answers = answers
        self._token_s = token_s

    async def _generate(self, request: web.Request) -> web.Response:
        await request.read()
        answer = random.choice(self._answers)
        await asyncio.sleep(answer.num_tokens * self._token_s)
        return web.Response(body=answer.body(self.version), content_type="application/json")


def serve(load: Load, pipe: Connection) -> None:
    """Run the servers of a load until the pipe ends; send their URLs, then take weight versions."""

    async def main() -> None:
        answers = render_answers(load.mean_tokens)
        servers = []
        bodies = [answer.body(0) for answer in answers]
        token_s = load.slots / load.rate
        for _ in range(load.num_servers):  # each starts before the next one looks for a free port
            whole = RenderedServer(answers, token_s)
            server = StreamedServer(bodies, token_s, load.streamed) if load.streamed else whole
            servers.append(await server.start())
        pipe.send([server.url for server in servers])
        while (version := await asyncio.to_thread(pipe.recv)) is not None:
            for server in servers:
                server.version = version
            pipe.send(version)

    asyncio.run(main())


async def measured(folder: Path, urls: Sequence[str], pipe: Connection, load: Load) -> dict[str, float]:
    """Return the controller's share of a core, and tokens per second, after the first two steps."""
    rollout = "actor_rollout_ref.rollout"
    config = make_config(
        folder,
        urls,
        f"data.train_batch_size={load.step_groups}",
        f"data.gen_batch_size={4 * load.step_groups}",
        f"data.max_response_length={LONGEST}",
        f"{rollout}.n={GROUP_SIZE}",
        f"{rollout}.max_concurrency={load.slots}",
        f"{rollout}.max_staleness=1",
        f"{rollout}.step_timeout_s=3600",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.dynamic_sampling.max_num_gen_batches=1000",
        "trainer.total_training_steps=100000",
    )
    controller = Controller(config)
    process = psutil.Process()
    try:
        await controller.start()
        gc.freeze()  # as the controller's process does
        num_tokens, num_answers, step = 0, 0, 0
        began, cpu_began = 0.0, 0.0
        while step < 3 or time.monotonic() - began < load.seconds:
            step += 1
            if step == 3:
                num_tokens = num_answers = 0
                began, cpu_began = time.monotonic(), _cpu_s(process)
            batch = await controller.next_batch(step, weight_version=step - 1)
            samples = [sample for group in batch.groups for sample in group.samples]
            num_answers += len(samples)
            num_tokens += sum(sample.num_response_tokens for sample in samples)
            pipe.send(step)
            await asyncio.to_thread(pipe.recv)
        seconds, cpu_s = time.monotonic() - began, _cpu_s(process) - cpu_began
    finally:
        await controller.close()
    return {
        "core_share": cpu_s / seconds,
        "trained_tokens_per_s": num_tokens / seconds,
        "answers_per_s": num_answers / seconds,
        "microseconds_per_token": 1e6 * cpu_s / num_tokens,
        "resident_mb": process.memory_info().rss / 1e6,
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def run(load: Load) -> dict:
    """Measure one load, with servers in a process of their own."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    servers = context.Process(target=serve, args=(load, far), daemon=True)
    servers.start()
    far.close()  # so that the end of the servers is seen
    with tempfile.TemporaryDirectory(prefix="controller-") as name:
        folder = Path(name)
        write_files(folder, num_prompts=100)
        _write_tokenizer(folder)
        sys.path.insert(0, name)
        try:
            client = StreamedClient if load.streamed else SGLangClient
            with patch("megatron_dapo.rollout.build_rollout.SGLangClient", client):
                result = asyncio.run(measured(folder, near.recv(), near, load))
        finally:
            sys.path.remove(name)
            sys.modules.pop("fake_rewards", None)
            servers.kill()
            servers.join()
    return {**asdict(load), **result}


def _write_tokenizer(folder: Path) -> None:
    """Give the folder a tokenizer of words of a language model's size."""
    words = {word: index for index, word in enumerate([*WORDS, *(f"w{n}" for n in range(len(WORDS), VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_controller", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small servers for a second")
    parser.add_argument("--servers", default="8,32,64", metavar="N,...", help="how many servers")
    parser.add_argument("--rate", type=float, default=5000.0, metavar="TOKENS_PER_S", help="of each server")
    parser.add_argument("--streams", default="0", metavar="TOKENS,...", help="of an event; 0: whole answers")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="that are measured, at least")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    loads = [
        Load(int(number), arguments.rate, 4, 6000, int(number) // 2, arguments.seconds, int(streamed))
        for number in arguments.servers.split(",")
        for streamed in arguments.streams.split(",")
    ]
    if arguments.quick:
        loads = [replace(loads[0], num_servers=2, rate=20_000.0, slots=4, mean_tokens=200, step_groups=2, seconds=1.0)]
    results = []
    for load in loads:
        print(f"controller: {load.num_servers} servers of {load.rate:g} tokens/s, {load.streamed}", file=sys.stderr)
        results.append(run(load))
    show(results)
    written("controller", torch.device("cpu"), results, arguments.json)


def show(results: Sequence[dict]) -> None:
    """Print a line for each number of servers."""
    columns = ("servers", "per event", "tokens/s asked", "trained on", "answers/s", "of a core", "us per token", "MB")
    table = plain_table("the controller's process", columns)
    for result in results:
        table.add_row(
            str(result["num_servers"]),
            str(result["streamed"] or "-"),
            f"{result['num_servers'] * result['rate']:.0f}",
            f"{result['trained_tokens_per_s']:.0f}",
            f"{result['answers_per_s']:.1f}",
            f"{result['core_share']:.0%}",
            f"{result['microseconds_per_token']:.2f}",
            f"{result['resident_mb']:.0f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
