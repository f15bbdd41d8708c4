"""Runs with rollout.deterministic and a real server are equal byte for byte,
also over kills and stops.

Responses, with their log-probs, are those of the dumped batches; metrics all but the times.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dapo.checkpointing.folders import newest_first
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.file_lock import FileLock
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_commands import ForkedPopen
from tests.proofs import few
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_STEPS, NUM_GROUPS, N = 4, 2, 4
TIMED = ("time", "perf/", "weight_sync/", "val/seconds", "reward/wait_share", "rollout/seconds", "rollout/tokens_per_s",
         "rollout/slots_used", "rollout/servers_waiting", "rollout/kv_used",
         "rollout/requests_used")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deterministic")
    make_tiny(folder / "model", "qwen2", layers=2)
    for name, numbers in (("prompts", range(6)), ("val", range(6, 9))):
        rows = [
            {"data_source": "made up", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": "0"}} for i in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def started(folder: Path, name: str, *more: str) -> tuple[RunFolder, ForkedPopen]:
    run = RunFolder(folder / name)
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files=[{folder}/prompts.jsonl]",
        f"data.val_files=[{folder}/val.jsonl]",
        "data.apply_chat_template=false",
        "data.max_response_length=24",
        f"data.train_batch_size={NUM_GROUPS}",
        f"actor_rollout_ref.rollout.n={N}",
        "actor_rollout_ref.rollout.val_n=2",
        "actor_rollout_ref.rollout.val_temperature=1.0",
        "actor_rollout_ref.rollout.deterministic=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_GROUPS}",
        "actor_rollout_ref.actor.optim.lr=0.001",
        "algorithm.dynamic_sampling.enable=true",
        "reward.function=tests.scripted_reward:even_length",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.test_freq=2",
        "trainer.save_interval=1",
        "trainer.dump_batches=true",
        f"trainer.run_dir={run.path}",
    ]
    with (folder / f"{name}.log").open("ab") as output:
        process = ForkedPopen(
            [sys.executable, "-m", "tests.forked_local", *overrides, *more],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=None,
        )
    return run, process


def finished(folder: Path, name: str, *more: str) -> RunFolder:
    run, process = started(folder, name, *more)
    assert process.wait(280) == 0, (folder / f"{name}.log").read_text()[-3000:]
    return run


def wait_for_a_checkpoint(run: RunFolder, process: ForkedPopen) -> None:
    """Also for a step behind the first, so that there is something to go back over."""
    deadline = time.monotonic() + 240
    while len(list(run.batches.glob("*"))) < 2 or not newest_first(run.checkpoints):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def content(run: RunFolder) -> tuple[list, list]:
    """(groups with all tokens and log-probs, then the answers of each validation; metrics, step by
    step). A group does not name its servers' ports."""
    contents: list = []
    for step in range(1, NUM_STEPS + 1):
        for group in read_batch(run.batches, step).groups:
            contents.append(replace(group, samples=tuple(replace(sample, servers=()) for sample in group.samples)))
    contents += [path.read_bytes() for path in sorted(run.validation(0).parent.iterdir())]
    metrics: dict[int, dict] = {}
    for line in map(json.loads, run.metrics.read_text().splitlines()):
        untimed = {name: value for name, value in line.items() if not name.startswith(TIMED)}
        metrics.setdefault(line["step"], {}).update(untimed)
    return contents, list(metrics.values())


@pytest.fixture(scope="module")
def unbroken(folder) -> tuple[list, list]:
    return content(finished(folder, "unbroken"))


def test_two_runs_of_one_seed_are_equal_whatever_is_sampled_at_once(folder, unbroken):
    contents, metrics = content(finished(folder, "one_at_a_time", "actor_rollout_ref.rollout.max_concurrency=1"))
    assert contents == unbroken[0] and metrics == unbroken[1]
    samples = [sample for group in contents[: NUM_STEPS * NUM_GROUPS] for sample in group.samples]
    assert len({tuple(sample.response_tokens) for sample in samples}) > 0.9 * len(samples) == 0.9 * 32


@pytest.mark.parametrize("end", few(["killed", "stopped"], 1))
def test_a_run_that_was_ended_and_resumed_equals_an_unbroken_one(folder, unbroken, end):
    run, process = started(folder, end)
    wait_for_a_checkpoint(run, process)
    if end == "killed":
        os.kill(FileLock(run.lock).holder_here(), signal.SIGKILL)
    else:
        run.stop.touch()
    assert process.wait(120) != 0
    contents, metrics = content(finished(folder, end, "trainer.resume=required"))
    assert contents == unbroken[0] and metrics == unbroken[1]
