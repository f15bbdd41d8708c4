"""The program with two pipeline stages and two servers: the same run in another layout,
on a tied Llama.

Its batches are dumped; replays without a server follow in the same layout and in another.
"""

import json
from pathlib import Path

import pytest

from launch.local import main
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_STEPS = 3


OVERRIDES = {
    "data.apply_chat_template": "false",
    "data.max_response_length": 12,
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.server.num_servers": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.optim.lr": "1e-3",
    "algorithm.dynamic_sampling.enable": "true",
    "reward.function": "tests.scripted_reward:even_length",
    "weight_sync.verify": "true",
    "trainer.dump_batches": "true",
    "trainer.total_training_steps": NUM_STEPS,
}
PP2 = {"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2, "trainer.n_procs_per_node": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Model and prompts; the run folders of all runs."""
    folder = tmp_path_factory.mktemp("pipeline")
    # 3 heads forbid TP=2
    make_tiny(folder / "model", "llama", tied=True, hidden=48, heads=3, kv_heads=3)
    rows = [{"data_source": "made up", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": "0"}} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folder: Path, name: str, layout: dict[str, int], *options: str, **more: str) -> list[dict]:
    """One run of the program; its metrics."""
    paths = {"actor_rollout_ref.model.path": folder / "model", "trainer.run_dir": folder / name}
    overrides = OVERRIDES | layout | paths | more
    settings = [f"{key}={value}" for key, value in overrides.items()]
    run_here(main, *options, *settings)
    return [json.loads(line) for line in RunFolder(folder / name).metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def metrics(folder) -> list[dict]:
    return run(folder, "run", PP2, **{"data.train_files": f"[{folder}/prompts.jsonl]"})


def test_every_step_trains_and_reaches_both_servers(metrics):
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    assert all(line["actor/num_optimizer_steps"] == 2 and line["actor/grad_norm"] > 0 for line in metrics)
    assert all(line["weight_sync/verify_s"] > 0 for line in metrics if "weight_sync/verify_s" in line)


def test_both_stages_weights_arrive_on_the_servers(metrics):
    """The last step was sampled with twice-updated weights;
    the servers' log-probs are the trainer's."""
    compared = [line["actor/rollout_abs_diff_max"] for line in metrics if "actor/rollout_kl" in line]
    assert compared and max(compared) < 1e-4


@pytest.fixture(scope="module")
def replays(folder, metrics) -> dict[str, list[dict]]:
    layouts = {"same layout": PP2, "one process": {}}
    batches = str(RunFolder(folder / "run").batches)
    return {name: run(folder, name, layout, "--replay", batches) for name, layout in layouts.items()}


def compared(line: dict) -> dict[str, float]:
    """A replay must give these again: all but the clock and the servers."""
    return {name: value for name, value in line.items() if name.split("/")[0] not in ("time", "perf", "weight_sync")}


def test_a_replay_in_the_same_layout_gives_every_metric_and_the_model_bit_for_bit(folder, metrics, replays):
    assert [compared(line) for line in replays["same layout"]] == [compared(line) for line in metrics]
    models = [RunFolder(folder / name).model / "model.safetensors" for name in ("run", "same layout")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_replay_in_another_layout_gives_the_same_numbers_but_for_rounding(metrics, replays):
    for got, expected in zip(replays["one process"], metrics, strict=True):
        # training makes the rounding larger: see test_ppo.py
        growth = 1 if got["step"] == 1 else 10
        for name, value in compared(expected).items():
            assert compared(got)[name] == pytest.approx(value, rel=1e-4 * growth, abs=1e-5 * growth), name


def test_a_replay_starts_neither_servers_nor_a_controller(folder, replays):
    logs = {path.name for path in RunFolder(folder / "one process").logs.iterdir()}
    assert logs == {"config.yaml", "launch.log", "trainer-rank-0.log"}
    assert not RunFolder(folder / "one process").batches.exists()
