"""The command eval with a real server: a run's own validation figures,
and no repeats after kill -9."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.rollout.handle import RolloutHandle
from megatron_dapo.servers.client import SGLangClient
from tests.helpers import REPOSITORY, run_module

pytestmark = pytest.mark.e2e

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def settings(server, tmp_path: Path) -> list[str]:
    """Of a run, and of an evaluation: 60 prompts, which the random model
    of characters answers somehow."""
    rows = [{"prompt": f"{a}+{b}=", "label": "a", "data_source": f"{a % 2}"} for a in range(6) for b in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"actor_rollout_ref.model.path={server.model_path}",
        f"data.val_files=[{tmp_path}/prompts.jsonl]",
        "data.apply_chat_template=false",
        "data.max_prompt_length=16",
        "data.max_response_length=24",
        "reward.function=tests.scripted_reward:even_length",
        "reward.num_workers=1",
        *server.supervisor.overrides(),
    ]


async def weight_version(server) -> int:
    async with SGLangClient(server.url, server.key) as client:
        return await client.weight_version()


def figures(output: Path) -> dict[str, dict]:
    return json.loads((output / "results.json").read_text())["figures"]


def test_the_figures_are_those_of_the_runs_own_evaluation(server, settings, tmp_path):
    run = [f"data.train_files=[{tmp_path}/prompts.jsonl]", f"trainer.run_dir={tmp_path}/run", "data.train_batch_size=4"]
    handle = RolloutHandle.start(load_config(None, [*settings, *run]))
    try:
        handle.wait_ready()
        metrics = handle.evaluate(3, asyncio.run(weight_version(server)))
    finally:
        handle.close()
    run_module("megatron_dapo", "eval", f"--output={tmp_path}/out", *settings)
    answered = figures(tmp_path / "out")
    for source, prefix in (("0", "val/0"), ("1", "val/1"), ("all", "val")):
        assert answered[source]["avg@1"]["value"] == metrics[f"{prefix}/accuracy"]
        assert answered[source]["length"]["value"] == metrics[f"{prefix}/response_length_mean"]
        assert answered[source]["truncated"]["value"] == metrics[f"{prefix}/truncation_ratio"]
    assert 0 < answered["all"]["avg@1"]["value"] < 1
    kept = [json.loads(line) for line in (tmp_path / "run/validation/step_000003.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    texts = {record["prompt"]: record["text"] for record in again}
    assert texts == {record["prompt"]: record["text"] for record in kept} and len(texts) == 60


def test_after_kill_9_no_answer_is_there_twice(server, settings, tmp_path):
    output = tmp_path / "out"
    sampled = [f"{ROLLOUT}.val_n=4", f"{ROLLOUT}.val_temperature=1.0"]
    command = ["megatron_dapo", "eval", f"--output={output}", *settings, *sampled]
    slowly = [sys.executable, "-m", *command, f"{ROLLOUT}.max_concurrency=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answers = output / "answers.jsonl"
    with subprocess.Popen(slowly, cwd=REPOSITORY, env=environment) as process:
        deadline = time.monotonic() + 100
        while not answers.exists() or answers.read_bytes().count(b"\n") < 40:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.kill()
    num_before = answers.read_bytes().count(b"\n")
    assert 40 <= num_before < 240
    assert f"{num_before} of 240 answers are there already" in run_module(*command)
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert Counter((record["prompt_index"], record["number"]) for record in records) == Counter(
        (prompt, number) for prompt in range(60) for number in range(4)
    )
    assert len(set(record["text"] for record in records)) > 60
