"""config.json of models with gated delta nets, as published, but of text alone."""

import math

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.model_spec import DeltaNet
from megatron_dapo.huggingface.model_tensors import hf_tensors, linear_modules
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.families import hybrid_layers

pytestmark = pytest.mark.unit

QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_output_gate": True, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "num_attention_heads": 24, "num_hidden_layers": 64,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": 248320,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
    **hybrid_layers(64, 4),
}  # fmt: skip
MIXTURE = {
    "hidden_size": 2048, "linear_num_value_heads": 32, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_key_value_heads": 2, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5_35B_A3B = QWEN3_5_27B | MIXTURE | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
    **hybrid_layers(40, 4),
}  # fmt: skip
QWEN3_NEXT_80B_A3B = QWEN3_5_27B | MIXTURE | {
    "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "vocab_size": 151936,
    **hybrid_layers(48, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"), [(QWEN3_5_27B, 26.9), (QWEN3_5_35B_A3B, 34.7), (QWEN3_NEXT_80B_A3B, 79.7)]
)
def test_published_hybrids_have_the_parameters_of_their_names(config, billions):
    """Without images and multi-token prediction."""
    spec = model_spec(config)
    assert round(sum(math.prod(shape) for shape in hf_tensors(spec).values()) / 1e9, 1) == billions


def test_qwen3_5_is_read_as_published():
    spec = model_spec(QWEN3_5_27B)
    assert spec.delta_net == DeltaNet(16, 48, 128, 128, 4) and spec.delta_net.values_per_key == 3
    with_attention = [layer for layer in range(64) if spec.has_attention(layer)]
    assert with_attention == list(range(3, 64, 4)) and spec.num_attention_layers == 16
    assert (spec.head_dim, spec.rotary_dim, spec.rope_theta) == (256, 64, 1e7)
    assert spec.qk_norm and spec.zero_centered_norms and spec.attention_output_gate
    tensors = hf_tensors(spec)
    assert tensors["model.layers.3.self_attn.q_proj.weight"] == (2 * 24 * 256, 5120)  # queries and gates
    assert tensors["model.layers.0.linear_attn.conv1d.weight"] == (2 * 16 * 128 + 48 * 128, 1, 4)
    assert not any(".linear_attn." in name for name in tensors if ".layers.3." in name)
    assert {"in_proj_a", "out_proj", "q_proj"} < set(linear_modules(spec))


def test_the_mixtures_have_a_shared_expert_with_a_gate():
    for config in (QWEN3_5_35B_A3B, QWEN3_NEXT_80B_A3B):
        moe = model_spec(config).moe
        assert (moe.shared_ffn_size, moe.shared_gate, moe.score, moe.norm_topk_prob) == (512, True, "softmax", True)


TEXT_FOLDER = "`python -m checkpoints_tools.text_folder IMAGE_FOLDER TEXT_FOLDER` writes a folder of text"
ROPE = QWEN3_5_27B["rope_parameters"]


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (QWEN3_5_27B, {"layer_types": None}, f"`layer_types` is missing, which transformers reads; {TEXT_FOLDER}"),
        (QWEN3_5_27B, {"full_attention_interval": None}, f"is missing, which SGLang reads; {TEXT_FOLDER}"),
        (QWEN3_5_27B, {"full_attention_interval": 8}, f"not those of full_attention_interval 8; {TEXT_FOLDER}"),
        (QWEN3_5_27B, {"full_attention_interval": 65}, "`full_attention_interval: 65` is not between 2 and"),
        (QWEN3_5_27B, {"architectures": ["Qwen3_5ForConditionalGeneration"]}, TEXT_FOLDER),
        (QWEN3_5_35B_A3B, {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, TEXT_FOLDER),
        (QWEN3_5_27B, {"attn_output_gate": False}, "attn_output_gate: False"),
        (QWEN3_5_27B, {"output_gate_type": "sigmoid"}, "output_gate_type: sigmoid"),
        (QWEN3_5_27B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (QWEN3_5_27B, {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "rope_parameters: "),
        (QWEN3_5_27B, {"rope_parameters": None}, "`rope_parameters` is missing"),
        (QWEN3_5_27B, {"head_dim": None}, "`head_dim` is missing"),
        (QWEN3_5_27B, {"linear_key_head_dim": None}, "`linear_key_head_dim` is missing"),
        (QWEN3_5_27B, {"linear_num_value_heads": 40}, "is not a multiple of linear_num_key_heads 16"),
        (QWEN3_5_27B, {"linear_num_key_heads": "16"}, '`linear_num_key_heads: "16"` is not a whole number'),
        (QWEN3_5_35B_A3B, {"norm_topk_prob": False}, "norm_topk_prob: False"),
        (QWEN3_5_35B_A3B, {"shared_expert_intermediate_size": None}, "`shared_expert_intermediate_size` is missing"),
        (QWEN3_5_35B_A3B, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: 0"),
    ],
)
def test_what_is_not_supported_of_a_hybrid_is_named_with_the_cure(config, change, words):
    with pytest.raises(UserError) as error:
        model_spec(config | change)
    (sentence,) = error.value.sentences
    assert words in sentence


def test_other_models_of_images_have_no_such_cure():
    with pytest.raises(UserError) as error:
        model_spec({"architectures": ["Gemma3ForConditionalGeneration"]})
    assert "text_folder" not in error.value.sentences[0]
