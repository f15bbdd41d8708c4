"""Near relatives of DeepSeek-V3: GLM-4.7-Flash and Kimi-K2 are read as published,
or refused by name."""

import json
import math

import pytest
from transformers import AutoConfig, DeepseekV3Config

from megatron_dapo.commands.plan.server_time import active_parameters
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.huggingface.model_tensors import hf_tensors, served_tensors
from megatron_dapo.huggingface.spec_reader import critic_spec, model_spec
from megatron_dapo.models.attention.rotary import attention_scale

pytestmark = pytest.mark.unit

GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
    "kv_lora_rank": 512, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
    "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config",
                 "AutoModel": "modeling_deepseek.DeepseekV3Model",
                 "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "kimi_k2",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 50000.0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
EDITED = KIMI_K2 | {"model_type": "deepseek_v3"}


def num_parameters(spec) -> int:
    return sum(math.prod(shape) for shape in hf_tensors(spec).values())


def test_glm_4_7_flash_is_read_as_published():
    spec = model_spec(GLM_47_FLASH)
    assert spec.moe == MoEConfig(
        num_experts=64, experts_per_token=4, norm_topk_prob=True, num_dense_layers=1, dense_ffn_size=10240,
        shared_ffn_size=1536, score="sigmoid", scaling_factor=1.8,
    )  # fmt: skip
    assert spec.latent == LatentAttention(q_rank=768, kv_rank=512, plain_dim=192, rotary_dim=64, value_dim=256)
    assert (spec.head_dim, spec.rotary_dim, spec.rope_theta, spec.norm_eps) == (256, 64, 1e6, 1e-5)
    assert spec.rotary_interleaved and spec.rope_scaling is None and attention_scale(spec) == 1 / 16
    # 31,221,488,576 in the index of the published files. They have one more layer, for prediction,
    # with its own embedding and head, a product of two hidden states, and three norms
    layer = num_parameters(spec) - num_parameters(model_spec(GLM_47_FLASH | {"num_hidden_layers": 46}))
    own = 2 * 154880 * 2048 + 2048 * 2 * 2048 + 3 * 2048
    assert spec.num_prediction_layers == 1 and num_parameters(spec) + layer + own == 31_221_488_576
    assert round(active_parameters(spec) / 1e9, 1) == 3.6  # "30B-A3B", model card
    # SGLang's router has a weight in float32, and DeepSeek-V3's has not
    router = "model.layers.1.mlp.gate.weight"
    assert served_tensors(spec)[router].types == ("float32",) and served_tensors(model_spec(EDITED))[router].types == ()


def test_what_transformers_writes_of_glm_4_7_flash_is_read_alike():
    config = AutoConfig.for_model(**GLM_47_FLASH)
    written = json.loads(config.to_json_string()) | {"architectures": GLM_47_FLASH["architectures"]}
    assert written["mlp_layer_types"] == ["dense", *["sparse"] * 46]
    assert model_spec(written) == model_spec(GLM_47_FLASH)
    absent = ("n_group", "topk_group", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "q_lora_rank")
    assert model_spec({key: value for key, value in written.items() if key not in absent}) == model_spec(GLM_47_FLASH)
    # a critic has a head of its own, and may say so
    assert critic_spec(GLM_47_FLASH | {"tie_word_embeddings": True}).value_head


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # SGLang reads this, transformers the other
        ({"first_k_dense_replace": None}, "`first_k_dense_replace` is missing"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace: 3` is not supported"),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 44}, "mlp_layer_types: ['dense', 'dense'"),
        ({"mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types: ['sparse'"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types: dense"),
        # SGLang's class ignores these
        ({"attention_bias": True}, "attention_bias: True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        ({"topk_method": "greedy"}, "topk_method: greedy"),
        ({"scoring_func": "softmax"}, "scoring_func: softmax"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4` is not num_attention_heads 20"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type `linear` is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: {'quant_method': 'fp8'}"),
    ],
)
def test_what_is_not_supported_of_glm_4_7_flash_is_named(change, named):
    with pytest.raises(UserError) as error:
        model_spec(GLM_47_FLASH | change)
    (sentence,) = error.value.sentences
    assert named in sentence


def test_kimi_k2_is_a_deepseek_v3_of_other_sizes():
    spec = model_spec(EDITED)
    assert spec.moe == MoEConfig(
        num_experts=384, experts_per_token=8, norm_topk_prob=True, num_dense_layers=1, dense_ffn_size=18432,
        shared_ffn_size=2048, score="sigmoid", scaling_factor=2.827,
    )  # fmt: skip
    assert (spec.num_heads, spec.latent.q_rank, spec.rope_theta, spec.moe.bytes_per_choice) == (64, 1536, 5e4, 2)
    assert (spec.rope_scaling.beta_fast, spec.rope_scaling.beta_slow, spec.num_prediction_layers) == (1.0, 1.0, 0)
    # of the published files, without scales of FP8 and tables of angles; "32 billion activated
    # parameters", model card
    assert num_parameters(spec) == 1_026_408_232_448
    assert round(active_parameters(spec) / 1e9) == 32


def test_kimi_k2s_own_type_is_refused_with_the_edit_that_transformers_needs_too(tmp_path):
    """Its folder names Python code, which nobody imports: not with this type, and none is needed
    with the other."""
    with pytest.raises(UserError) as error:
        model_spec(KIMI_K2)
    (sentence,) = error.value.sentences
    assert "`model_type: kimi_k2` is not supported" in sentence and "set it to deepseek_v3" in sentence
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KIMI_K2))
    with pytest.raises(ValueError, match="kimi_k2|custom code"):
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    path.write_text(json.dumps(EDITED))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(config) is DeepseekV3Config and config.n_routed_experts == 384


def test_another_type_of_this_architecture_is_refused_without_an_edit_that_nobody_tried():
    with pytest.raises(UserError) as error:
        model_spec(KIMI_K2 | {"model_type": "kimi_k9"})
    (sentence,) = error.value.sentences
    assert "`model_type: kimi_k9` is not supported" in sentence and "set it" not in sentence
    with pytest.raises(UserError, match="`quantization_config: .*fp8.*bfloat16"):
        model_spec(EDITED | {"quantization_config": {"quant_method": "fp8"}})
