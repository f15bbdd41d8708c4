"""A run on two ranks with the functions of docs/extend.md that the trainer calls."""

import json
import re
from pathlib import Path

import pytest

from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_ranks import run_ranks
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
NUM_STEPS = 5
# the run has this module at its side, as it has one in the folder it is started in
WORKER = """
import sys
sys.path.insert(0, {folder!r})
from megatron_dapo.__main__ import main
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_run_uses_the_functions_of_the_page(tmp_path):
    (tmp_path / "my_run.py").write_text("\n".join(re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())))
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(folder=str(tmp_path)))
    run = tmp_path / "run"
    run_ranks(
        worker,
        2,
        f"actor_rollout_ref.model.path={make_tiny(tmp_path / 'model', 'qwen2', layers=2)}",
        "trainer.n_procs_per_node=2",
        f"trainer.run_dir={run}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_interval=2",
        "trainer.keep_last=1",
        "trainer.synthetic_batch=true",
        "trainer.logger=[jsonl, my_run:Lines]",
        "trainer.checkpoint_hook=my_run:saved",
        "algorithm.adv_estimator=my_run:advantages",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.lr_decay_style=my_run:decay",
        "data.max_prompt_length=16",
        "data.max_response_length=32",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    records = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    assert all(record["actor/grad_norm"] > 0 for record in records)
    rates = [1e-3 * min(1, (1 - step / NUM_STEPS) / 0.2) for step in range(1, NUM_STEPS + 1)]
    assert [record["actor/lr"] for record in records] == pytest.approx(rates)
    assert (run / "rewards.txt").read_text() == "".join(f"{r['step']} {r['reward/mean']}\n" for r in records)
    assert (run / "saved.txt").read_text().split() == [f"step_{step:06d}" for step in (2, 4, 5)]
