"""Rotary frequencies are those of transformers bit for bit, for all settings of config.json."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Glm4Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding

from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.models.attention.rotary import attention_scale, rotary_frequencies
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

FACTORS = st.floats(0.5, 64.0)
POSITIONS = st.integers(64, 131072)
LINEAR = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS})
LLAMA3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": FACTORS,
        "low_freq_factor": st.floats(0.25, 2.0),
        "high_freq_factor": st.floats(2.5, 8.0),
        "original_max_position_embeddings": POSITIONS,
    }
)
YARN = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), "factor": FACTORS, "original_max_position_embeddings": POSITIONS},
    optional={
        "beta_fast": st.floats(8.0, 64.0),
        "beta_slow": st.floats(0.25, 4.0),
        "mscale": st.floats(0.1, 2.0),
        "mscale_all_dim": st.floats(0.1, 2.0),
        "truncate": st.booleans(),
    },
)


# a step: all frequencies up to a pair are kept, the others divided
KIMI_K2 = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def spec_with(rope: dict, head_dim: int = 64) -> ModelSpec:
    return model_spec(
        MODEL_JSON | {"architectures": ["LlamaForCausalLM"], "head_dim": head_dim, "rope_parameters": rope}
    )


@settings(max_examples=150, deadline=None)
@given(rope=LINEAR | LLAMA3 | YARN, theta=st.sampled_from([1e4, 5e5, 1e6]), head_dim=st.sampled_from([16, 64, 128]))
@example(rope=KIMI_K2, theta=5e4, head_dim=64)
def test_frequencies_and_attention_factor_are_those_of_transformers(rope, theta, head_dim):
    rope = rope | {"rope_theta": theta}
    spec = spec_with(rope, head_dim)
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=dict(rope))
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    assert torch.equal(rotary_frequencies(spec), frequencies)
    # cosines and sines, which both query and key are multiplied by, have the factor there
    assert attention_scale(spec) == pytest.approx(factor**2 / math.sqrt(head_dim), rel=1e-12)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_frequencies_of_a_part_of_the_dimensions_are_those_of_transformers(rope):
    rope = rope | {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    spec = model_spec(MODEL_JSON | {"architectures": ["Glm4ForCausalLM"], "head_dim": 64, "rope_parameters": rope})
    config = Glm4Config(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=dict(rope))
    assert len(rotary_frequencies(spec)) == 16
    assert torch.equal(rotary_frequencies(spec), Glm4RotaryEmbedding(config).inv_freq)


def test_frequencies_without_scaling_by_hand():
    spec = spec_with({"rope_type": "default", "rope_theta": 10000.0}, head_dim=8)
    torch.testing.assert_close(rotary_frequencies(spec), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert attention_scale(spec) == 1 / math.sqrt(8)
