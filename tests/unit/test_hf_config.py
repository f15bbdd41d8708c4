"""A config.json is read whole or refused by name."""

import json
import math
import re

import pytest

from megatron_dapo.commands.plan.server_time import active_parameters
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.family import DENSE, Family
from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.huggingface.rope import RopeScaling
from megatron_dapo.huggingface.spec_reader import critic_spec, model_spec, read_model_spec
from megatron_dapo.huggingface.windows import Windows
from megatron_dapo.models.attention.rotary import attention_scale
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648,
    "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_qwen2_5_32b_is_read_as_published():
    spec = model_spec(QWEN2)
    assert (spec.num_layers, spec.hidden_size, spec.ffn_size, spec.vocab_size) == (64, 5120, 27648, 152064)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope_theta) == (40, 8, 128, 1e6)
    assert spec.qkv_bias and not spec.qk_norm and not spec.tied_embeddings and spec.rope_scaling is None


def test_new_and_old_names_of_the_rotary_settings_mean_the_same():
    llama = {**QWEN2, "architectures": ["LlamaForCausalLM"]}
    del llama["rope_theta"]
    new = {**llama, "rope_parameters": {**LLAMA3, "rope_theta": 5e5, "factor": 32.0}}
    old = {**llama, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "factor": 32.0}}
    assert model_spec(new) == model_spec(old)
    assert model_spec(new).rope_scaling == RopeScaling("llama3", 32.0, 8192)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "Qwen3ForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": 4}, ["layer_types: 4"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, ["longrope", "linear, llama3, yarn"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, ["high_freq_factor: 4.0", "not above low_freq_factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor: null", "a number above 0"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["original_max_position_embeddings: null"]),
        ({"rope_scaling": YARN | {"attention_factor": 1.2}}, ["attention_factor: 1.2", "must be absent"]),
        ({"rope_scaling": YARN | {"attn_factor": 0.5}}, ["attn_factor: 0.5", "must be 1, or absent"]),
        ({"rope_scaling": YARN | {"truncate": "no"}}, ['truncate: "no"']),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, ["factor: null", "a number above 0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}},
         ["original_max_position_embeddings: null", "a whole number above 0"]),
        # transformers and SGLang take the first of these two, perhaps with another type
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_theta": 1e6}}, ["differ; keep"]),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor: 0.5"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["rope_parameters", "all layers"]),
        ({"rope_parameters": "yarn"}, ["rope_parameters", "all layers"]),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(change, named):
    with pytest.raises(UserError) as error:
        model_spec({**QWEN2, **change})
    assert all(word in str(error.value) for word in named)


@pytest.mark.parametrize("key", ["num_hidden_layers", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"])
@pytest.mark.parametrize("value", ["4", -1, {}, [64]])
def test_a_value_of_a_wrong_type_is_named(key, value):
    with pytest.raises(UserError) as error:
        model_spec({**QWEN2, key: value})
    (sentence,) = error.value.sentences
    assert f"`{key}: {json.dumps(value)}` is not " in sentence


def test_null_is_as_good_as_absent():
    nothing = dict.fromkeys(("head_dim", "rope_scaling", "rope_parameters", "tie_word_embeddings", "num_experts"))
    assert model_spec(QWEN2 | nothing) == model_spec(QWEN2)
    for nobody in (None, [], "Qwen2ForCausalLM", {"a": 1}):
        with pytest.raises(UserError, match="architecture `none` is not supported"):
            model_spec(QWEN2 | {"architectures": nobody})
    with pytest.raises(UserError, match="`hidden_size` is missing"):
        model_spec(QWEN2 | {"hidden_size": None})


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_qwen3_30b_a3b_is_read_as_published():
    spec = model_spec(QWEN3_MOE)
    assert spec.moe == MoEConfig(num_experts=128, experts_per_token=8, norm_topk_prob=True)
    assert (spec.ffn_size, spec.active_ffn_size) == (768, 8 * 768)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 4, 128) and spec.qk_norm and not spec.qkv_bias
    # 30.5 billion parameters, as its name and model card say
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 30_532_122_624
    newer = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert model_spec(newer) == spec


REFUSED_OF_QWEN3_MOE = [
    ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2"),
    ({"mlp_only_layers": [0]}, "mlp_only_layers: [0]"),
    ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size: 512"),
    ({"num_experts": None}, "`num_experts` is missing"),
    ({"num_experts_per_tok": 129}, "num_experts_per_tok: 129"),
    ({"num_experts": 2.5}, "`num_experts: 2.5` is not a whole number above 0"),
    ({"num_experts_per_tok": 1}, "norm_topk_prob: true"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "num_experts: 128` is not supported for Qwen3ForCausalLM"),
]  # fmt: skip


GLM_45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
    "vocab_size": 151552,
}  # fmt: skip


def test_glm_4_5_air_is_read_as_published():
    spec = model_spec(GLM_45_AIR)
    assert spec.moe == MoEConfig(
        num_experts=128, experts_per_token=8, norm_topk_prob=True, num_dense_layers=1, dense_ffn_size=10944,
        shared_ffn_size=1408, score="sigmoid",
    )  # fmt: skip
    assert (spec.head_dim, spec.rotary_dim, spec.rope_theta) == (128, 64, 1e6) and spec.qkv_bias and not spec.qk_norm
    assert (spec.ffn_size, spec.active_ffn_size, spec.num_moe_layers) == (1408, 9 * 1408, 45)
    # "106 billion total and 12 billion active parameters", model card
    assert round(sum(math.prod(shape) for shape in hf_tensors(spec).values()) / 1e9) in (106, 107)
    assert active_parameters(spec) // 10**9 == 12
    assert model_spec({k: v for k, v in GLM_45_AIR.items() if k != "partial_rotary_factor"}) == spec


REFUSED_OF_GLM_45_AIR = [
    ({"n_group": 4, "topk_group": 2}, "topk_group: 2` is not supported with num_experts_per_tok 8"),
    ({"n_group": 3}, "`n_group: 3`, `topk_group: 1` do not fit 128 experts"),
    ({"norm_topk_prob": False}, "norm_topk_prob: false` is not supported with a sigmoid router"),
    ({"first_k_dense_replace": 46}, "`first_k_dense_replace: 46` leaves no layer with experts"),
    ({"first_k_dense_replace": -1}, "`first_k_dense_replace: -1` is not a whole number, 0 or above"),
    ({"n_routed_experts": None}, "`n_routed_experts` is missing"),
    ({"n_shared_experts": None}, "`n_shared_experts` is missing"),
    ({"partial_rotary_factor": 1.5}, "`partial_rotary_factor: 1.5` is not supported; it must be above 0"),
    ({"architectures": ["LlamaForCausalLM"], "attention_bias": False, "partial_rotary_factor": 1.0,
      "n_shared_experts": 0}, "n_routed_experts: 128` is not supported for LlamaForCausalLM"),
]  # fmt: skip


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def test_deepseek_v3_is_read_as_published_but_for_its_fp8():
    spec = model_spec(DEEPSEEK_V3)
    assert spec.moe == MoEConfig(
        num_experts=256, experts_per_token=8, norm_topk_prob=True, num_dense_layers=3, dense_ffn_size=18432,
        shared_ffn_size=2048, score="sigmoid", scaling_factor=2.5, num_groups=8, groups_per_token=4,
    )  # fmt: skip
    assert spec.latent == LatentAttention(q_rank=1536, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128)
    assert (spec.head_dim, spec.rotary_dim, spec.value_dim, spec.rotary_interleaved) == (192, 64, 128, True)
    # DeepSeek's own code multiplies the root of 192 by the square
    # of 0.1 x mscale_all_dim x ln 40 + 1
    assert attention_scale(spec) == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192), rel=1e-12)
    # "671B total parameters with 37B activated", arXiv 2412.19437
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 671_026_419_200
    assert round(active_parameters(spec) / 1e9) == 37
    with pytest.raises(UserError, match="`quantization_config: .*fp8.*` is not supported .*bfloat16"):
        model_spec(DEEPSEEK_V3 | {"quantization_config": FP8})
    as_transformers_writes = {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}
    assert model_spec(DEEPSEEK_V3 | as_transformers_writes) == spec
    assert model_spec(DEEPSEEK_V3 | {"q_lora_rank": None}).latent.q_rank is None


REFUSED_OF_DEEPSEEK_V3 = [
    ({"kv_lora_rank": None}, "`kv_lora_rank` is missing"),
    ({"q_lora_rank": 0}, "`q_lora_rank: 0` is not a whole number above 0"),
    ({"num_key_value_heads": 8}, "num_key_value_heads: 8` is not num_attention_heads 128"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: 63` is not even"),
    ({"v_head_dim": 193}, "v_head_dim: 193` is above qk_nope_head_dim + qk_rope_head_dim"),
    ({"attention_bias": True}, "attention_bias: True"),
    ({"topk_method": "greedy"}, "topk_method: greedy"),
    ({"scoring_func": None}, "scoring_func: None"),
    ({"moe_layer_freq": 2}, "moe_layer_freq: 2"),
    ({"router_fp32": True}, "`router_fp32: True` is not supported"),
    ({"n_group": 256}, "`n_group: 256` leaves 256 experts in groups of one"),
    ({"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"apply_yarn_scaling": False}},
     "`apply_yarn_scaling: false` is not supported; it must be true or absent"),
    ({"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"apply_scale": False}},
     "`apply_scale: false` is not supported; it must be true or absent"),
    ({"rope_interleave": 1}, "`rope_interleave: 1` is not true or false"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type `linear` is not supported; supported are d"),
    ({"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.7}}, "`mscale: 0.7` is not mscale_all_dim"),
    ({"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}},
     "`mscale_all_dim: null` is not supported"),
]  # fmt: skip


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None}


def test_gpt_oss_is_read_as_published_but_for_its_mxfp4():
    spec = model_spec(GPT_OSS_20B)
    assert spec.moe == MoEConfig(num_experts=32, experts_per_token=4, norm_topk_prob=True)
    assert spec.windows == Windows(128, (True, False) * 12, rope_theta=None) and spec.of_local_layers() is None
    assert (spec.activation, spec.glu_limit) == ("quick_gelu", 7.0)
    assert spec.attention_sinks and spec.linear_biases and spec.qkv_bias and not spec.rope_scaling.truncate
    assert attention_scale(spec) == pytest.approx((0.1 * math.log(32) + 1) ** 2 / 8, rel=1e-12)
    # arXiv 2508.10925, table 1: 20.91B, 3.61B of them active; 116.83B and 5.13B;
    # the embedding is not active
    for config, total, active in ((GPT_OSS_20B, 20.91, 3.61), (GPT_OSS_120B, 116.83, 5.13)):
        spec = model_spec(config)
        assert round(sum(math.prod(shape) for shape in hf_tensors(spec).values()) / 1e9, 2) == total
        assert round(active_parameters(spec) / 1e9, 2) == active
    with pytest.raises(UserError, match="`quantization_config: .*mxfp4.*` is not supported .*bfloat16"):
        model_spec(GPT_OSS_20B | {"quantization_config": {"quant_method": "mxfp4"}})
    absent = ("layer_types", "sliding_window", "head_dim", "num_key_value_heads", "rope_theta", "swiglu_limit")
    assert model_spec({key: value for key, value in GPT_OSS_20B.items() if key not in absent}) == model_spec(
        GPT_OSS_20B
    )


REFUSED_OF_GPT_OSS_20B = [
    ({"attention_bias": False}, "`attention_bias: False` is not supported"),
    ({"swiglu_alpha": 1.5}, "swiglu_alpha: 1.5"),
    ({"layer_types": None, "sliding_window_pattern": 3}, "sliding_window_pattern: 3"),
    ({"hidden_act_alpha": 1.5}, "hidden_act_alpha: 1.5"),
    ({"swiglu_limit": None}, "`swiglu_limit` is missing"),
    ({"swiglu_limit": 0}, "`swiglu_limit: 0` is not a number above 0"),
    ({"norm_topk_prob": False}, "norm_topk_prob: False"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings: True"),
    ({"rope_scaling": None}, "`rope_parameters` is missing"),
    ({"sliding_window": None}, "`sliding_window` is missing"),
    ({"layer_types": ["chunked_attention"] * 24}, "layer_types: ['chunked_attention'"),
    ({"intermediate_size": None}, "`intermediate_size` is missing"),
]  # fmt: skip


MISTRAL = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 14336, "max_position_embeddings": 128000, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
}  # fmt: skip


def test_mistral_nemo_is_read_as_published():
    spec = model_spec(MISTRAL)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope_theta) == (32, 8, 128, 1e6)
    assert not spec.qkv_bias and not spec.qk_norm and spec.rope_scaling is None
    # 12.2 billion parameters, as its model card says
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 12_247_782_400


def test_a_field_that_mistral_leaves_out_is_what_transformers_takes_for_it():
    """Its window is 4096 tokens unless config.json says null, and it has 8 key-value heads."""
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UserError, match="`sliding_window: 4096` is not supported for MistralForCausalLM"):
        model_spec(absent)
    fewer = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    assert model_spec(fewer).num_kv_heads == 8


GLM4 = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768,
    "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "vocab_size": 151552,
}  # fmt: skip


def test_glm_4_9b_is_read_whole():
    """9.4 billion parameters. Absent fields have transformers' defaults: this model's own."""
    spec = model_spec(GLM4)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rotary_dim) == (32, 2, 128, 64)
    assert spec.qkv_bias and spec.output_norms and spec.rotary_interleaved and not spec.qk_norm
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 9_400_279_040
    in_block = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}
    assert model_spec({k: v for k, v in GLM4.items() if k != "partial_rotary_factor"} | in_block) == spec
    left_out = ("attention_bias", "head_dim", "num_key_value_heads", "partial_rotary_factor")
    assert model_spec({key: value for key, value in GLM4.items() if key not in left_out}) == spec
    assert not model_spec(GLM4 | {"attention_bias": False}).qkv_bias
    assert model_spec(GLM4 | {"partial_rotary_factor": 1.0}).rotary_dim == 128


REFUSED_OF_GLM4 = [
    ({"partial_rotary_factor": 1.5}, "`partial_rotary_factor: 1.5` is not supported; it must be above 0"),
    ({"attention_bias": "no"}, '`attention_bias: "no"` is not true or false'),
    ({"rope_scaling": YARN}, "yarn rope with `partial_rotary_factor: 0.5` is not supported"),
]  # fmt: skip


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip
GEMMA3_ROPES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}  # fmt: skip


def test_gemma_3_1b_is_read_whole():
    spec = model_spec(GEMMA3)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_dim) == (4, 1, 256, 256)
    assert spec.tied_embeddings and spec.qk_norm and spec.output_norms and spec.zero_centered_norms
    assert (spec.activation, spec.embedding_scale) == ("gelu_tanh", 1152**0.5)
    # layers 6, 12, 18 and 24 see all
    assert spec.windows == Windows(512, tuple(number % 6 != 0 for number in range(1, 27)), 1e4)
    assert (spec.rope_theta, spec.of_local_layers().rope_theta, spec.num_local_layers) == (1e6, 1e4, 22)
    # one billion, as its name says
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 999_885_952


def test_gemma_3_has_two_kinds_of_rotary_settings_under_new_and_old_names():
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    bare = {key: value for key, value in GEMMA3.items() if key not in ("rope_theta", "rope_local_base_freq")}
    spec = model_spec(bare | {"rope_parameters": GEMMA3_ROPES})
    assert model_spec(GEMMA3 | old) == spec
    assert (spec.rope_theta, spec.rope_scaling, spec.windows.rope_theta) == (2e6, RopeScaling("linear", 8.0), 3e4)
    assert spec.of_local_layers().rope_scaling is None
    # absent: transformers' default
    absent = model_spec(bare)
    assert (absent.rope_theta, absent.windows.rope_theta) == (1e6, 1e4)
    by_layer = ["full_attention", *["sliding_attention"] * 25]
    assert model_spec(GEMMA3 | {"layer_types": by_layer}).windows.is_local == (False, *[True] * 25)


def test_an_exported_critic_of_gemma_3_is_read_again():
    """Its config.json says that nothing is tied, which a policy may not say."""
    critic = critic_spec(GEMMA3)
    assert critic.value_head and not critic.tied_embeddings and critic.windows == model_spec(GEMMA3).windows
    exported = {"architectures": ["Gemma3ForTokenClassification"], "tie_word_embeddings": False}
    assert critic_spec(GEMMA3 | exported) == critic


REFUSED_OF_GEMMA3 = [
    ({"layer_types": ["full_attention"]}, "a list of 26, for each layer full_attention or"),
    ({"layer_types": ["chunked_attention"] * 26}, "it must be a list of 26"),
    ({"sliding_window": None}, "`sliding_window` is missing"),
    ({"sliding_window": 0}, "`sliding_window: 0` is not a whole number above 0"),
    ({"tie_word_embeddings": False}, "`tie_word_embeddings: False` is not supported"),
    ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping: 30.0` is not supported"),
    ({"hidden_activation": "gelu"}, "`hidden_activation: gelu` is not supported"),
    ({"use_bidirectional_attention": True}, "`use_bidirectional_attention: True` is not supported"),
    ({"rope_parameters": GEMMA3_ROPES | {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     "linear rope of sliding_attention is not supported"),
]  # fmt: skip
REFUSED = (
    (QWEN3_MOE, REFUSED_OF_QWEN3_MOE),
    (GLM_45_AIR, REFUSED_OF_GLM_45_AIR),
    (DEEPSEEK_V3, REFUSED_OF_DEEPSEEK_V3),
    (GPT_OSS_20B, REFUSED_OF_GPT_OSS_20B),
    (GLM4, REFUSED_OF_GLM4),
    (GEMMA3, REFUSED_OF_GEMMA3),
)


@pytest.mark.parametrize(("config", "change", "named"), [(config, *row) for config, rows in REFUSED for row in rows])
def test_what_is_not_supported_of_a_family_is_named(config, change, named):
    with pytest.raises(UserError) as error:
        model_spec(config | change)
    (sentence,) = error.value.sentences
    assert named in sentence


def test_what_one_family_takes_or_refuses_holds_for_that_family_alone(monkeypatch):
    """As Mistral: `sliding_window` acts by itself, but for Qwen2 only with use_sliding_window."""
    own = {**DENSE, "sliding_window": lambda value: value is None, "attention_bias": lambda value: True}
    monkeypatch.setitem(FAMILIES, "ToyForCausalLM", Family(architecture="ToyForCausalLM", server_class="", neutral=own))

    def refused(architecture, **fields):
        try:
            model_spec(QWEN2 | {"architectures": [architecture]} | fields)
        except UserError as error:
            return error.sentences
        return []

    assert refused("ToyForCausalLM", sliding_window=None) == refused("Qwen2ForCausalLM", sliding_window=4096) == []
    (sentence,) = refused("ToyForCausalLM", sliding_window=4096)
    assert "`sliding_window: 4096` is not supported for ToyForCausalLM" in sentence
    assert refused("ToyForCausalLM", sliding_window=None, attention_bias=True) == []
    (sentence,) = refused("LlamaForCausalLM", attention_bias=True)
    assert "`attention_bias: True` is not supported for LlamaForCausalLM" in sentence


def test_everything_wrong_is_reported_together():
    broken = {k: v for k, v in QWEN2.items() if k != "vocab_size"} | {"hidden_act": "gelu", "mlp_bias": True}
    with pytest.raises(UserError) as error:
        model_spec(broken)
    assert len(error.value.sentences) == 3


def test_a_folder_without_a_config_is_an_error_with_the_key(tmp_path):
    with pytest.raises(UserError, match="actor_rollout_ref.model.path"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(("tp", "padded"), [(1, 131), (2, 132), (4, 132)])
def test_the_vocabulary_is_padded_to_equal_shares(tp, padded):
    assert model_spec(json.loads(json.dumps(QWEN2)) | {"vocab_size": 131}).padded_vocab_size(tp) == padded


def test_families_and_the_page_of_models_name_the_same_architectures():
    page = (REPOSITORY / "docs" / "models.md").read_text()
    assert set(re.findall(r"`(\w+ForCausalLM)`", page)) == set(FAMILIES)
