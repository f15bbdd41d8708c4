"""Run under torchrun on two GPUs with Transformer Engine: one model with and without user buffers.

Argument: a model's folder.
"""

import sys

from megatron_dapo.models.user_buffers import release_user_buffers
from megatron_dapo.platform.parallel import ParallelLayout
from tests import training_checks as checks

LAYERS = [
    f"{checks.MEGATRON}.use_transformer_engine=on",
    f"{checks.MEGATRON}.tensor_model_parallel_size=2",
    f"{checks.MEGATRON}.sequence_parallel=true",
    f"{checks.ACTOR}.max_tokens_per_microbatch=256",
    "trainer.n_procs_per_node=2",
]
OVERLAP = f"{checks.MEGATRON}.tp_comm_overlap=true"
# mean difference of log-probs in bfloat16, and relative one of a gradient norm:
# sums in another order
LOG_PROBS, NORM = 0.05, 0.05


def main() -> None:
    layout = ParallelLayout.initialize(tp=2, sp=True)
    folder = sys.argv[1]
    checks.check_agreement(layout, folder, LAYERS, [*LAYERS, OVERLAP], LOG_PROBS)
    norms = []
    for settings in (LAYERS, [*LAYERS, OVERLAP]):
        policy, mini_batches = checks.policy_and_mini_batches(layout, folder, settings)
        norms.append(policy.update(mini_batches, weight_version=0)["actor/grad_norm"])
    assert abs(norms[1] - norms[0]) <= NORM * norms[0], norms
    print(f"rank {layout.rank} agreed", flush=True)
    release_user_buffers()
    layout.shutdown()


if __name__ == "__main__":
    main()
