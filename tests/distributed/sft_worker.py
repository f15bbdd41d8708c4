"""Run on every rank: two optimizer steps of supervised fine-tuning at many layouts and cuts, saved
by rank 0.

Arguments: a JSON file with {"overrides": [...], "out": path, "layouts": [[name, sizes,
{variant: overrides}], ...]}.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.config.loader import load_config
from megatron_dapo.data.conversations import ConversationSet
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.conversation_batches import ConversationDistributor, ConversationDraws
from megatron_dapo.training.policy import Policy
from tests.distributed.layout_worker import first_step_recorded, gathered
from tests.distributed.process_groups import leave

NUM_STEPS = 2


def run_variant(layout: ParallelLayout, overrides: list[str]) -> dict:
    """Return gradients and metrics of the first step, metrics of both, the loss of the held-out
    file after them, and the weights."""
    config = load_config(None, overrides)
    policy = Policy(config, layout)
    distribute = ConversationDistributor(config, layout, policy.model.spec)
    draws = held_out = None
    if layout.rank == 0:
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        draws = ConversationDraws.of(ConversationSet.load(config.data.train_files, config, tokenizer), config)
        held_out = ConversationSet.load(config.data.val_files, config, tokenizer).samples
    own_held_out = distribute.held_out(held_out)
    result: dict = {"before": policy.held_out_loss(own_held_out.batches()), "steps": [], "num_micro_batches": []}
    for step in range(NUM_STEPS):
        mini_batch = distribute(draws.next(config.data.train_batch_size) if draws else None)
        result["num_micro_batches"].append(len(mini_batch))
        with first_step_recorded(policy, result):
            result["steps"].append(policy.update([mini_batch], weight_version=step))
    result["metrics"] = result["steps"][0]
    result["after"] = policy.held_out_loss(own_held_out.batches())
    result["weights"] = gathered(policy.weight_source(), layout)
    return result


def main() -> None:
    torch.set_num_threads(1)
    task = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for name, sizes, variants in task["layouts"]:
        layout = ParallelLayout.initialize(**sizes)
        for variant, overrides in variants.items():
            results[f"{name}/{variant}"] = run_variant(layout, [*task["overrides"], *overrides])
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(results, task["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
