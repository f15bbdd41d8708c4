"""A run with a real server and controller, stopped by a file and resumed:
no group is lost or doubled.

It starts from a model in the form of hf_to_megatron: the server begins without weights, and gets
them from the trainer. launch.local and its trainer are forks without imports.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dapo.checkpointing.folders import newest_first, read_controller_state
from megatron_dapo.storage.run_folder import RunFolder
from tests.e2e.conftest import converted
from tests.forked_commands import ForkedPopen
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_STEPS, NUM_GROUPS, GEN_BATCH = 300, 4, 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[RunFolder, list[str]]:
    """The run folder after a stop, a resume and two more steps; both outputs."""
    folder = tmp_path_factory.mktemp("stopped")
    run = RunFolder(folder / "run")
    model = converted(make_tiny(folder / "hf", "qwen2", layers=2), folder / "model")
    prompts = folder / "prompts.jsonl"
    rows = [{"data_source": "made up", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": "0"}} for i in range(90)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files=[{prompts}]",
        "data.apply_chat_template=false",
        "data.max_response_length=12",
        f"data.train_batch_size={NUM_GROUPS}",
        f"data.gen_batch_size={GEN_BATCH}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.dump_samples=100",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_GROUPS}",
        "algorithm.dynamic_sampling.enable=true",
        "reward.function=tests.scripted_reward:even_length",
        "weight_sync.verify=true",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.run_dir={run.path}",
    ]
    printed = [_stopped_run(run, overrides, num_steps=3)]
    printed.append(_stopped_run(run, [*overrides, "trainer.resume=required"], num_steps=2))
    return run, printed


def _stopped_run(run: RunFolder, overrides: list[str], num_steps: int) -> str:
    """Ask for a stop after num_steps more steps have metrics; the output."""
    done = len(_metrics(run))
    log = run.path.with_name(f"after_{done}.log")
    with log.open("ab") as output:
        process = ForkedPopen(
            [sys.executable, "-m", "tests.forked_local", *overrides],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=None,
        )
    deadline = time.monotonic() + 240
    while len(_metrics(run)) < done + num_steps and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    run.stop.touch()
    code = process.wait(120)
    assert code == 85, log.read_text()
    return log.read_text()


def _metrics(run: RunFolder) -> list[dict]:
    lines = run.metrics.read_text().split("\n")[:-1] if run.metrics.exists() else []
    return [json.loads(line) for line in lines]


def test_the_second_start_continues_the_first(runs):
    run, (first, second) = runs
    stopped = int(first.partition("Stopped after step ")[2].split()[0])
    assert f"by the file {run.stop}" in first and not run.stop.exists()
    assert f"Resumed after step {stopped} from {run.checkpoint(stopped)}" in second
    assert f"weight version {stopped}" in second and "not restored: nothing is missing" in second
    steps = [line["step"] for line in _metrics(run)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= stopped + 2


def test_the_servers_get_the_restored_weights(runs):
    """The first step after the resume was sampled with them:
    the servers' log-probs are the trainer's."""
    compared = [line["actor/rollout_abs_diff_max"] for line in _metrics(runs[0]) if "actor/rollout_kl" in line]
    assert compared and max(compared) < 1e-4


def test_every_group_is_trained_on_once_and_none_is_lost(runs):
    run, _ = runs
    steps = [line["step"] for line in _metrics(run)]
    used = [json.loads(text)["uid"] for step in steps for text in run.rollout(step).read_text().splitlines()]
    assert len(used) == NUM_GROUPS * len(steps) and len(set(used)) == len(used)
    queue = read_controller_state(newest_first(run.checkpoints)[0])["queue"]
    waiting = [group["uid"] for group in queue["kept"]]
    dropped = sum(line["dapo/num_filtered_groups"] for line in _metrics(run))
    discarded = sum(line["rollout/num_groups_discarded"] for line in _metrics(run))
    accounted = len(used) + len(waiting) + dropped + discarded + len(queue["open"])
    assert accounted == queue["num_drawn"] and not set(waiting) & set(used)


def test_the_checkpoint_is_self_contained(runs):
    newest = newest_first(Path(runs[0].checkpoints))[0]
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (newest / "hf").iterdir()}
