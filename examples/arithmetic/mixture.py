"""The demo with a mixture of experts whose routing is replayed.

    python -m examples.arithmetic.mixture [key=value ...]

The base model is made as the demo's, but it is a small GLM-4.5: a dense layer, then three with eight experts of which a
token takes two, and a shared one. The trainer takes the experts that the server chose (router_replay: rollout).
"""

import sys
from pathlib import Path

from examples.arithmetic.pretrain import DEMONSTRATIONS, SETTINGS, accuracies
from examples.arithmetic.problems import split, write_files
from examples.cache import cache_folder
from examples.character_model import EOS, PAD, VOCABULARY, is_made, make
from examples.demo_run import Demo

EXPERTS = 8


def new_mixture():
    """Return a mixture with random weights. The bias by which its routers choose stays as it is drawn here."""
    from torch.nn import init
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=2,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            use_qk_norm=True,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=VOCABULARY[EOS],
            pad_token_id=VOCABULARY[PAD],
        )
    )
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            init.normal_(buffer, std=0.02)
    return model


def base() -> Path:
    """Make the base model where there is none, and return its folder."""
    folder = cache_folder() / "mixture_base"
    if not is_made(folder, SETTINGS):
        make(folder, SETTINGS, DEMONSTRATIONS, split()[0], accuracies, new_mixture)
    return folder


DEMO = Demo(
    title="DAPO on two-digit sums: a small mixture of experts learns to work them out digit by digit.",
    config="demo.yaml",
    files=write_files,
    model=base,
    next_steps=(
        (
            "let its routers choose",
            ".venv/bin/python -m examples.arithmetic.mixture actor_rollout_ref.actor.router_replay=off",
        ),
    ),
)
OVERRIDES = (
    "trainer.experiment_name=mixture",
    "trainer.total_training_steps=40",
    "actor_rollout_ref.actor.router_replay=rollout",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
)

if __name__ == "__main__":
    sys.exit(DEMO.run([*OVERRIDES, *sys.argv[1:]]))
