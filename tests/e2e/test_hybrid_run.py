"""A tiny Qwen3.5 mixture learns with its real server: apart, with adapters, ahead of the trainer;
and in turns with the trainer on the same GPUs."""

import json
from pathlib import Path

import pytest

from launch.local import main
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_STEPS = 4
OVERRIDES = {
    "data.apply_chat_template": "false",
    "data.max_response_length": 24,
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.optim.lr": "1e-3",
    "actor_rollout_ref.actor.router_replay": "rollout",
    "reward.function": "tests.scripted_reward:even_length",
    "weight_sync.verify": "true",
    "weight_sync.verify_num_tensors": 10_000,
    "trainer.total_training_steps": NUM_STEPS,
}
AHEAD = {
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.model.target_modules": "all-linear",
    "actor_rollout_ref.rollout.max_staleness": 1,
    "algorithm.rollout_correction.rollout_is": "token",
}
IN_TURNS = {"actor_rollout_ref.hybrid_engine": "true"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_tiny(folder / "model", "qwen3_5_moe", layers=4)
    rows = [{"data_source": "made up", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": "0"}} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("keys", [AHEAD, IN_TURNS], ids=["ahead", "in_turns"])
def test_server_and_trainer_agree_on_every_token_with_the_servers_experts(folder, keys, request):
    """The bounds are those of the demo (test_program.py). All weights are compared after a push."""
    name = request.node.callspec.id
    paths = {"actor_rollout_ref.model.path": folder / "model", "trainer.run_dir": folder / name}
    paths |= {"data.train_files": f"[{folder}/prompts.jsonl]"}
    run_here(main, *[f"{key}={value}" for key, value in (OVERRIDES | keys | paths).items()])
    steps = [json.loads(line) for line in RunFolder(folder / name).metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(0.0 <= step["actor/router_mismatch"] < 0.1 for step in steps)
    compared = [step for step in steps if "actor/rollout_kl" in step]
    assert compared
    print([(step["actor/rollout_abs_diff"], step["actor/rollout_abs_diff_max"]) for step in compared])
    assert max(step["actor/rollout_abs_diff"] for step in compared) < 1e-6
    assert max(step["actor/rollout_abs_diff_max"] for step in compared) < 5e-4
