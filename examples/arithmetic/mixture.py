"""The demo with a mixture of experts and router replay.

    python -m examples.arithmetic.mixture [key=value ...]

The base model is the demo's, made into a small GLM-4.5 (sparse upcycling, arXiv 2212.05055). It has
a dense layer, then three layers with a shared expert and two of eight in the MLP's place. The
trainer takes the server's choice of experts (router_replay: rollout).
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.arithmetic.problems import BASE, write_files
from examples.cache import cache_folder
from examples.demo_run import Demo
from megatron_dapo.common.files import publish_folder

EXPERTS = 8
NOISE = 0.1
"""Random relative change of each weight of an expert: with it the choice of experts matters."""


def upcycled(folder: Path) -> None:
    """Write the checkpoint.

    Shared and routed experts are the dense MLP with half of its output each. The weights of the
    chosen ones add up to 1: but for the noise the answers are the base model's.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    torch.manual_seed(1)
    source = dense.config
    config = Glm4MoeConfig(
        **{name: getattr(source, name) for name in KEPT},
        rope_parameters=source.rope_parameters | {"partial_rotary_factor": 1.0},
        attention_bias=True,
        use_qk_norm=False,
        head_dim=source.hidden_size // source.num_attention_heads,
        moe_intermediate_size=source.intermediate_size,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    model = Glm4MoeForCausalLM(config)
    model.load_state_dict(dense.state_dict(), strict=False)  # all but the experts
    for layer, of_dense in zip(model.model.layers, dense.model.layers, strict=True):
        mlp, whole = layer.mlp, of_dense.mlp
        if not hasattr(mlp, "experts"):
            continue
        mlp.shared_experts.load_state_dict(whole.state_dict())
        with torch.no_grad():
            mlp.shared_experts.down_proj.weight *= 0.5
            copies = torch.cat([whole.gate_proj.weight, whole.up_proj.weight]), whole.down_proj.weight * 0.5
            for experts, copy in zip((mlp.experts.gate_up_proj, mlp.experts.down_proj), copies, strict=True):
                experts.copy_(copy * (1 + NOISE * torch.randn_like(experts)))
            mlp.gate.weight.normal_(std=0.02)
            mlp.gate.e_score_correction_bias.normal_(std=0.02)
    model.generation_config = dense.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)


KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def base() -> Path:
    """Make the base model in a second, and return its folder."""
    folder = cache_folder() / "mixture_base"
    with TemporaryDirectory(dir=folder.parent) as place:
        upcycled(Path(place) / "new")
        publish_folder(Path(place) / "new", folder, Path(place) / "old")
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
