"""Shapes of published models by name, for plans without a download: fields of config.json.

The names are the base models'. Their chat models have the same shape, but sometimes fewer
positions: max_position_embeddings of Qwen2.5-7B is 131072, and of Qwen2.5-7B-Instruct 32768.
"""

from typing import Any

from megatron_dapo.common.errors import UserError


def _qwen2(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    tied: bool = False,
    positions: int = 131072,
    eps: float = 1e-6,
) -> dict[str, Any]:
    return _decoder("Qwen2ForCausalLM", hidden, layers, heads, kv_heads, ffn) | {
        # embeddings of 7B and more are padded further than those of the small ones
        "vocab_size": 151936 if tied else 152064,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
    }


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False) -> dict[str, Any]:
    return _decoder("Qwen3ForCausalLM", hidden, layers, heads, kv_heads, ffn) | {
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    }


def _qwen3_moe(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    return _qwen3(hidden, layers, heads, kv_heads, ffn) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": expert_ffn,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


def _hybrid(
    architecture: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, values: int, vocabulary: int
) -> dict[str, Any]:
    """Return a hybrid's shape. values: heads of a delta net's values."""
    return _decoder(architecture, hidden, layers, heads, kv_heads, ffn) | {
        "full_attention_interval": 4,
        "head_dim": 256,
        "layer_types": layers // 4 * (3 * ["linear_attention"] + ["full_attention"]),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
    }


def _hybrid_moe(architecture: str, layers: int, experts: int, per_token: int, vocabulary: int) -> dict[str, Any]:
    return _hybrid(architecture, 2048, layers, 16, 2, 5120, values=32, vocabulary=vocabulary) | {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "shared_expert_intermediate_size": 512,
    }


def _glm_moe(
    hidden: int, layers: int, ffn: int, expert_ffn: int, experts: int, dense: int, *, scaling: float, qk_norm: bool
) -> dict[str, Any]:
    return _decoder("Glm4MoeForCausalLM", hidden, layers, 96, 8, ffn) | {
        "attention_bias": True,
        "first_k_dense_replace": dense,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": expert_ffn,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": scaling,
        "tie_word_embeddings": False,
        "use_qk_norm": qk_norm,
        "vocab_size": 151552,
    }


def _llama3(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return _decoder("LlamaForCausalLM", hidden, layers, heads, kv_heads, ffn) | {
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _decoder("GptOssForCausalLM", 2880, layers, 64, 8, 2880) | {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }


def _latent(
    architecture: str, hidden: int, layers: int, heads: int, ffn: int, expert_ffn: int, experts: int, per_token: int
) -> dict[str, Any]:
    """Return the shape of a mixture with latent attention, its first layer dense."""
    return _decoder(architecture, hidden, layers, heads, heads, ffn) | {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_intermediate_size": expert_ffn,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": per_token,
        "qk_rope_head_dim": 64,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }


def _deepseek(heads: int, experts: int, positions: int, vocabulary: int, yarn_factor: int) -> dict[str, Any]:
    return _latent("DeepseekV3ForCausalLM", 7168, 61, heads, 18432, 2048, experts, 8) | {
        "max_position_embeddings": positions,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn",
            "factor": yarn_factor,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "v_head_dim": 128,
        "vocab_size": vocabulary,
    }


def _decoder(architecture: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
    }


MODEL_SHAPES: dict[str, dict[str, Any]] = {
    # Qwen/Qwen2.5-*: technical report arXiv 2412.15115, table 1. 1.5b and 72b: positions of 7b, 32b
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, tied=True, positions=32768),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, tied=True, positions=32768),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824, eps=1e-5),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648, eps=1e-5),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29568, eps=1e-5),
    # Qwen/Qwen3-*: technical report arXiv 2505.09388, tables 1 and 2
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 12288, 1536),
    # Qwen/Qwen3.5-*, Qwen3.6-*, of text alone (docs/checkpoints.md), and Qwen/Qwen3-Next-80B-A3B-*; without the
    # layers of multi-token prediction
    "qwen3.5-9b": _hybrid("Qwen3_5ForCausalLM", 4096, 32, 16, 4, 12288, values=32, vocabulary=248320),
    "qwen3.5-27b": _hybrid("Qwen3_5ForCausalLM", 5120, 64, 24, 4, 17408, values=48, vocabulary=248320),
    "qwen3.5-35b-a3b": _hybrid_moe("Qwen3_5MoeForCausalLM", 40, 256, 8, 248320),
    "qwen3.6-27b": _hybrid("Qwen3_5ForCausalLM", 5120, 64, 24, 4, 17408, values=48, vocabulary=248320),
    "qwen3.6-35b-a3b": _hybrid_moe("Qwen3_5MoeForCausalLM", 40, 256, 8, 248320),
    "qwen3-next-80b-a3b": _hybrid_moe("Qwen3NextForCausalLM", 48, 512, 10, 151936),
    # zai-org/GLM-4-9B-0414: defaults of transformers' Glm4Config
    "glm-4-9b": _decoder("Glm4ForCausalLM", 4096, 40, 32, 2, 13696)
    | {
        "attention_bias": True,
        "head_dim": 128,
        "vocab_size": 151552,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    # google/gemma-3-1b-*: arXiv 2503.19786, table 1
    "gemma-3-1b": _decoder("Gemma3ForCausalLM", 1152, 26, 4, 1, 6912)
    | {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    # zai-org/GLM-4.5*: arXiv 2508.06471, table 1; without the layer of multi-token prediction
    "glm-4.5-air": _glm_moe(4096, 46, 10944, 1408, 128, 1, scaling=1.0, qk_norm=False),
    "glm-4.5": _glm_moe(5120, 92, 12288, 1536, 160, 3, scaling=2.5, qk_norm=True),
    # deepseek-ai/DeepSeek-V3*, -R1*: arXiv 2412.19437, section 4.2; without the layer of
    # multi-token prediction; in bfloat16, but published in FP8
    "deepseek-v3": _deepseek(128, 256, 163840, 129280, 40)
    | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    # moonshotai/Kimi-K2-Base, -Instruct: arXiv 2507.20534, table 2; published in FP8, too
    "kimi-k2": _deepseek(64, 384, 131072, 163840, 32) | {"routed_scaling_factor": 2.827, "rope_theta": 50000},
    # zai-org/GLM-4.7-Flash: its config.json; without the layer of multi-token prediction
    "glm-4.7-flash": _latent("Glm4MoeLiteForCausalLM", 2048, 47, 20, 10240, 1536, 64, 4)
    | {
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    # openai/gpt-oss-*: arXiv 2508.10925, section 2; in bfloat16, but published in MXFP4
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    # meta-llama/Llama-3.1-*: arXiv 2407.21783, table 3
    "llama-3.1-8b": _llama3(4096, 32, 32, 8, 14336),
    "llama-3.1-70b": _llama3(8192, 80, 64, 8, 28672),
}


def model_json_named(name: str) -> dict[str, Any]:
    """Return the shape fields of a published model's config.json. Raises UserError with the known
    names."""
    if (shape := MODEL_SHAPES.get(name.lower())) is None:
        raise UserError(f"--model is {name}, which is not in the table; known are {', '.join(MODEL_SHAPES)}.")
    return shape
