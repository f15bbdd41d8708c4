"""A tiny Qwen3.5 mixture learns with its real server: apart, with adapters, ahead of the trainer;
and in turns with the trainer on the same GPUs."""

import json
from pathlib import Path

import pytest
import torch

from launch.local import main
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests.distributed.test_parity import hugging_face_log_probs
from tests.families import ROUNDINGS
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
    "trainer.dump_batches": "true",
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


def rounding(run: RunFolder, model: Path) -> torch.Tensor:
    """Of log-probs in float32, by transformers: of the first step's tokens, by the first weights."""
    samples = [sample for group in read_batch(run.batches, 1).groups for sample in group.samples]
    sequences = [[*sample.prompt_tokens.tolist(), *sample.response_tokens.tolist()] for sample in samples]
    rounded, exact = (hugging_face_log_probs(model, sequences, dtype) for dtype in (torch.float32, torch.float64))
    parts = [
        (one - other)[len(sample.prompt_tokens) - 1 :]
        for one, other, sample in zip(rounded, exact, samples, strict=True)
    ]
    return torch.cat(parts).abs()


@pytest.mark.parametrize("keys", [AHEAD, IN_TURNS], ids=["ahead", "in_turns"])
def test_server_and_trainer_agree_on_every_token_with_the_servers_experts(folder, keys, request):
    """Every push is compared in all weights."""
    run = RunFolder(folder / request.node.callspec.id)
    paths = {"actor_rollout_ref.model.path": folder / "model", "trainer.run_dir": run.path}
    paths |= {"data.train_files": f"[{folder}/prompts.jsonl]"}
    run_here(main, *[f"{key}={value}" for key, value in (OVERRIDES | keys | paths).items()])
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(step["actor/grad_norm"] > 0 and 0.0 <= step["actor/router_mismatch"] < 0.1 for step in steps)
    of_transformers = rounding(run, folder / "model")
    compared = [step for step in steps if "actor/rollout_kl" in step]
    mean, largest = (max(step[f"actor/rollout_abs_diff{end}"] for step in compared) for end in ("", "_max"))
    print(f"{mean:.1e} and {largest:.1e}, of {of_transformers.mean():.1e} and {of_transformers.max():.1e}")
    assert mean < ROUNDINGS * of_transformers.mean()
    assert largest < ROUNDINGS * of_transformers.max()
