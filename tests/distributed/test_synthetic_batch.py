"""A run on synthetic batches, without a server: the same numbers on one rank
and two tensor-parallel ones."""

import json
from pathlib import Path

import pytest

from megatron_dapo.storage.run_folder import RunFolder
from tests.distributed.layout_runs import assert_same
from tests.forked_ranks import run_ranks
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

NUM_STEPS = 2


def run(folder: Path, model: Path, tp: int) -> list[dict]:
    """Return the run's record of each step, without seconds."""
    run_ranks(
        Path(__file__).with_name("train_worker.py"),
        tp,
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tp}",
        f"trainer.n_procs_per_node={tp}",
        f"trainer.run_dir={folder}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.synthetic_batch=true",
        "trainer.logger=[jsonl]",
        "data.max_prompt_length=16",
        "data.max_response_length=32",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    lines = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith(("time", "perf/"))} for line in lines]


def test_a_run_without_servers_learns_and_does_not_depend_on_the_layout(tmp_path):
    model = make_tiny(tmp_path / "model", "qwen2", layers=2)
    alone, split = (run(tmp_path / f"tp{tp}", model, tp) for tp in (1, 2))
    assert [line["step"] for line in alone] == list(range(1, NUM_STEPS + 1))
    assert all(line["actor/grad_norm"] > 0 for line in alone)
    assert len({line["response_length/mean"] for line in alone}) == NUM_STEPS
    assert_same({"metrics": split[0]}, {"metrics": alone[0]})
    # after a step of Adam, which divides by gradients as small as their rounding:
    # see tests/e2e/test_ppo.py
    for name in ("actor/loss", "actor/grad_norm"):
        assert split[1][name] == pytest.approx(alone[1][name], rel=1e-3, abs=1e-5)
