"""Responses scored a second by each kind of reward, all on the same responses in one run.

The kinds are reward functions of each form, and the tests of programs in their sandbox. A reward
model and a judge run on real SGLang servers.

python -m benchmarks.bench_rewards [--quick] [--responses N] [--json FILE]
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import plain_table, written
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.build_rollout import make_scorers
from megatron_dapo.servers.run_servers import RunServers
from tests.tiny_models import CHAT_TEMPLATE, make_tiny, make_tiny_classifier

GROUP_SIZE = 8
NUM_WORKERS = 2
QUESTION = "read numbers from one line and print their sum"
TESTS = json.dumps({"inputs": ["1 2 3\n", "-4 4\n"], "outputs": ["6\n", "0\n"]})
JUDGE_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """A kind of reward: its name, the reward function, and keys of the config."""

    name: str
    function: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Served:
    """The config's overrides with the servers' names, by their askers."""

    model: tuple[str, ...]
    judge: tuple[str, ...]


def responses(number: int) -> list[str]:
    """Return `number` different responses: right programs, and every fourth a wrong one."""
    texts = []
    for place in range(number):
        program = "print(6)" if place % 4 == 3 else "print(sum(map(int, input().split())))"
        texts.append(f"this is answer {place}\n```python\n{program}\n```")
    return texts


def cases(served: Served) -> list[Case]:
    return [
        Case("plain function", "benchmarks.reward_functions:plain"),
        Case("async function", "benchmarks.reward_functions:coroutine"),
        Case(f"group function, n = {GROUP_SIZE}", "benchmarks.reward_functions:group"),
        Case("batched function", "benchmarks.reward_functions:batched"),
        Case("code_tests, 2 tests", "code_tests"),
        Case("reward model", "none", served.model),
        Case(f"judge, {JUDGE_TOKENS} tokens", "none", served.judge),
        Case("plain function + reward model", "benchmarks.reward_functions:plain", served.model),
    ]


async def scored(config: Config, texts: Sequence[str]) -> tuple[list[RewardResult], float]:
    """Return the verdicts on all responses, asked for at once, and their seconds.

    The seconds of the start do not count.
    """
    reward = config.reward
    pool = RewardPool(reward.function, {}, NUM_WORKERS, 60.0, 4096)
    scorers = make_scorers(config)
    await pool.start()
    await scorers.start(60.0)
    prompt = Prompt(0, "key", (1,), "", "taco", TESTS, messages=[{"role": "user", "content": QUESTION}])

    async def one(text: str) -> RewardResult:
        return await scorers.combined(await pool.score("taco", text, TESTS), prompt, text)

    async def of_group(group_texts: Sequence[str]) -> list[RewardResult]:
        return await pool.score_group("taco", group_texts, TESTS)

    try:
        began = time.perf_counter()
        if pool.scores_groups:
            groups = (of_group(texts[start : start + GROUP_SIZE]) for start in range(0, len(texts), GROUP_SIZE))
            results = [result for results in await asyncio.gather(*groups) for result in results]
        else:
            results = await asyncio.gather(*map(one, texts))
        return results, time.perf_counter() - began
    finally:
        await pool.close()
        await scorers.close()


def measured(folder: Path, served: Served, number: int) -> list[dict]:
    """Return a row per kind of reward; each scores `number` responses, the slow ones fewer."""
    rows: list[dict] = []
    for case in cases(served):
        is_slow = case.name.startswith(("code_tests", "judge"))
        texts = responses(number // 8 if is_slow else number)
        config = load_config(None, [f"trainer.run_dir={folder}/run", f"reward.function={case.function}", *case.keys])
        results, seconds = asyncio.run(scored(config, texts))
        rows.append(
            {
                "reward": case.name,
                "num_responses": len(texts),
                "num_errors": sum(result.error is not None for result in results),
                "seconds": seconds,
                "per_s": len(texts) / seconds,
                "of_plain": len(texts) / seconds / (rows[0]["per_s"] if rows else len(texts) / seconds),
            }
        )
        print(f"{case.name}: {rows[-1]['per_s']:.0f} responses/s", file=sys.stderr)
    return rows


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Serve a tiny reward model and a tiny judge, and yield the keys with their names."""
    judge = make_tiny(folder / "judge", "qwen2")
    (judge / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    model = make_tiny_classifier(folder / "model", "qwen2")
    rollout = "actor_rollout_ref.rollout"
    keys = [
        f"trainer.run_dir={folder}/run",
        f"actor_rollout_ref.model.path={judge}",
        f"reward.model.path={model}",
        f"{rollout}.server.startup_timeout_s=300.0",
    ]
    servers = RunServers.of(load_config(None, keys), folder)
    servers.start()
    try:
        while not servers.check():
            time.sleep(0.2)
        url, _ = servers.urls
        of_model = [
            f"reward.model.path={model}",
            *servers.overrides()[-2:],
            f"{rollout}.server.startup_timeout_s=300.0",
        ]
        of_judge = [
            f"reward.judge.url={url}/v1",
            f"reward.judge.api_key_file={servers.key_file}",
            f"reward.judge.max_tokens={JUDGE_TOKENS}",
            "reward.judge.prompt={response}",
            r"reward.judge.pattern=(\d)",
        ]
        yield Served(tuple(of_model), tuple(of_judge))
    finally:
        servers.stop()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_rewards", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few responses")
    parser.add_argument("--responses", type=int, default=4096, metavar="N", help="of the fast kinds (4096)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)  # a random judge gives few scores
    number = 128 if arguments.quick else arguments.responses
    with tempfile.TemporaryDirectory(prefix="rewards-") as name, serving(Path(name)) as served:
        rows = measured(Path(name), served, number)
    show(rows)
    written("rewards", torch.device("cpu"), rows, arguments.json)


def show(rows: Sequence[dict]) -> None:
    """Print a line for each kind of reward."""
    table = plain_table("one run", ("reward", "responses", "no verdict", "per second", "of the plain function's"))
    for row in rows:
        table.add_row(
            row["reward"],
            str(row["num_responses"]),
            str(row["num_errors"]),
            f"{row['per_s']:.0f}",
            f"{row['of_plain']:.3f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
