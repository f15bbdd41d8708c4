"""Published config.json files of hybrids of gated delta nets and attention are read whole."""

import math

import pytest

from megatron_dapo.commands.plan.server_time import active_parameters
from megatron_dapo.huggingface.model_spec import DeltaNet
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.huggingface.spec_reader import model_spec

pytestmark = pytest.mark.unit

QWEN35_9B = {  # text_config of the published file, completed by checkpoints_tools.text_folder
    "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_output_gate": True, "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "layer_types": 8 * [*3 * ["linear_attention"], "full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_5_text", "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
QWEN35_27B = QWEN35_9B | {
    "hidden_size": 5120, "intermediate_size": 17408, "layer_types": 2 * QWEN35_9B["layer_types"],
    "linear_num_value_heads": 48, "num_attention_heads": 24, "num_hidden_layers": 64,
}  # fmt: skip
QWEN35_35B_A3B = {key: value for key, value in QWEN35_9B.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "model_type": "qwen3_5_moe_text",
    "layer_types": 10 * [*3 * ["linear_attention"], "full_attention"], "moe_intermediate_size": 512, "num_experts": 256,
    "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_NEXT = {  # layer_types and rope_parameters added by checkpoints_tools.text_folder
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5120, "layer_types": 12 * [*3 * ["linear_attention"], "full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_theta": 10000000,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def hybrid_parameters(config: dict) -> int:
    """Count a hybrid's parameters by hand: of delta nets, attention with a gate, MLPs, vocabulary."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["linear_num_value_heads"]
    values, conv = 128 * heads, 2 * 16 * 128 + 128 * heads
    net = hidden * (conv + values + 2 * heads) + 4 * conv + 2 * heads + 128 + hidden * values
    queries, keys = 256 * config["num_attention_heads"], 256 * config["num_key_value_heads"]
    attention = hidden * (2 * queries + 2 * keys + queries) + 2 * 256
    mlp = 3 * hidden * (config["intermediate_size"] if "num_experts" not in config else 512)
    if "num_experts" in config:  # each expert and the shared one, the router, the shared one's gate
        mlp = (config["num_experts"] + 1) * mlp + config["num_experts"] * hidden + hidden
    norms = 2 * hidden * layers + hidden
    return layers // 4 * (3 * net + attention) + layers * mlp + norms + 2 * config["vocab_size"] * hidden


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(QWEN35_9B, 9.0, 7.9), (QWEN35_27B, 26.9, 25.6), (QWEN35_35B_A3B, 34.7, 2.9), (QWEN3_NEXT, 79.7, 3.6)],
)
def test_hybrids_are_read_as_published_and_have_their_parameters(config, total, active):
    """Their names and cards say 9, 27, 35 with 3, and 80 with 3 billion."""
    spec = model_spec(config)
    assert (spec.head_dim, spec.rotary_dim, spec.rope_theta, spec.attention_every) == (256, 64, 1e7, 4)
    assert spec.attention_output_gate and spec.qk_norm and spec.zero_centered_norms and not spec.qkv_bias
    assert spec.delta_net == DeltaNet(16, config["linear_num_value_heads"], 128, 128, 4)
    number = sum(math.prod(shape) for shape in hf_tensors(spec).values())
    assert number == hybrid_parameters(config) and round(number / 1e9, 1) == total
    assert round(active_parameters(spec) / 1e9, 1) == active
