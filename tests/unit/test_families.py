"""Layers of families that differ from the plain decoder: bfloat16 rounding,
Transformer Engine options.

Log-probs and layouts: tests/distributed.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from megatron_dapo import run_setup
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models import build
from megatron_dapo.models.attention.delta_net import GatedDeltaNet
from megatron_dapo.models.attention.latent_attention import LatentSelfAttention
from megatron_dapo.models.attention.rotary import rotary_frequencies
from megatron_dapo.models.build import ModelParts, build_model
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.models.layers import (
    OutputNorm,
    PackedAttention,
    ProductRoundedNorm,
    RMSNorm,
    TwoRopesAttention,
    gelu_tanh,
    quick_gelu,
)
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.weight_sync.buckets import plan_buckets
from tests.distributed.parity_worker import log_probs, sample
from tests.families import own_layers
from tests.tiny_models import make_tiny

# after megatron_dapo.models, which prepares megatron.core for this machine
from megatron.core.extensions.transformer_engine import TEDotProductAttention  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer.attention import SelfAttention  # isort: skip

pytestmark = pytest.mark.unit

FAMILIES = own_layers()


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    """Checkpoints in bfloat16."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_tiny(folder / family, family, layers=4, hidden=96, vocab=131)
        AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.bfloat16).save_pretrained(folder / family)
    return {family: str(folder / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def models(layout, paths) -> dict[str, ModelParts]:
    built = {}
    for family, path in paths.items():
        built[family] = build_model(read_model_spec(path), layout, MegatronConfig(dtype="bfloat16"))
        load_hf_weights(built[family], path, layout)
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "module", "zero_centered"),
    [(RMSNorm, Glm4RMSNorm, False), (RMSNorm, Gemma3RMSNorm, True), (ProductRoundedNorm, GptOssRMSNorm, False)],
)
def test_norms_round_as_those_of_transformers_do(ours, module, zero_centered, dtype):
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=zero_centered)
    generator = torch.Generator().manual_seed(0)
    norm, expected = ours(config, 64, eps=1e-6), module(64, eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator))
        expected.weight.copy_(norm.weight)
    x = torch.randn(50, 64, generator=generator).to(dtype)
    assert torch.equal(norm(x), expected(x))


def test_all_norms_of_a_model_are_those_of_its_family(models):
    for family, kind in (("gpt_oss", ProductRoundedNorm), ("glm4", RMSNorm)):
        decoder = models[family].chunks[0].decoder
        norms = [n for layer in decoder.layers for n in (layer.input_layernorm, layer.pre_mlp_layernorm)]
        assert {type(norm) for norm in (*norms, decoder.final_layernorm)} == {kind}


def test_the_norm_of_an_output_comes_before_it_is_added():
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True, layernorm_zero_centered_gamma=False)
    norm = OutputNorm(config, 2, eps=0.0)
    added = norm(True, False)((torch.tensor([3.0, 4.0]), None), torch.tensor([10.0, 20.0]), 0.0)
    rms = 12.5**0.5
    torch.testing.assert_close(added, torch.tensor([10 + 3 / rms, 20 + 4 / rms]))
    assert norm.weight.sequence_parallel  # each tensor-parallel rank sees a part of the sequence


def test_embeddings_are_scaled_in_the_models_type(layout, models):
    """sqrt(96) is 9.798; in bfloat16 9.8125."""
    (chunk,) = models["gemma3"].chunks
    weight = chunk.embedding.word_embeddings.weight
    expected = Gemma3TextScaledWordEmbedding(131, 96, 0, embed_scale=96**0.5).to(torch.bfloat16)
    expected.weight.data.copy_(weight)
    tokens = torch.arange(131)[None]
    seen = []
    handle = chunk.decoder.register_forward_pre_hook(
        lambda module, arguments, options: seen.append(options["hidden_states"]), with_kwargs=True
    )
    log_probs(models["gemma3"], layout, [sample(0, tokens[0].tolist())] * 2, packed=True)
    handle.remove()
    assert torch.equal(seen[0][:131, 0], expected(tokens)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_log_probs_are_as_near_to_those_of_float32_as_transformers_come(layout, models, paths, family):
    """Both are of the same weights. Over 239 tokens the ratio of two such means has a standard
    error of about 7 %."""
    draw = random.Random(0)
    sequences = [[draw.randrange(128) for _ in range(length)] for length in (13, 40, 2, 60, 24, 7, 100)]
    exact, rounded = (_log_probs_of_transformers(paths[family], d, sequences) for d in (torch.float32, torch.bfloat16))
    got = log_probs(models[family], layout, [sample(i, tokens) for i, tokens in enumerate(sequences)], packed=True)
    own = torch.cat([got[index].double() for index in range(len(sequences))])
    assert (own - exact).abs().mean() < 1.25 * (rounded - exact).abs().mean()


def _log_probs_of_transformers(path: str, dtype: torch.dtype, sequences: list[list[int]]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    answers = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens])
            log_p = torch.log_softmax(model(ids).logits[0].double(), -1)
            answers.append(log_p[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(answers)


def what_megatron_is_told(monkeypatch, layout, path: str, lora: LoraSettings | None = None):
    """Return (config, layer, options, chunk) on a machine said to have a GPU and Transformer
    Engine; building its layers needs the package itself."""
    asked, chunk = [], SimpleNamespace(rotary_pos_emb=SimpleNamespace())
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "HAVE_TE", True)
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(f"megatron.core.models.common.embeddings.rope_utils.{name}", print)
    for name in (
        "permute",
        "permute_with_probs",
        "unpermute",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
    ):
        monkeypatch.setattr(f"megatron.core.transformer.moe.moe_utils.fused_{name}", print, raising=False)
    monkeypatch.setattr(
        build,
        "get_gpt_layer_with_transformer_engine_spec",
        lambda **options: get_gpt_layer_local_spec(qk_layernorm=options["qk_layernorm"], normalization="RMSNorm"),
    )
    monkeypatch.setattr(build, "ModelChunk", lambda *arguments, **options: asked.append((arguments, options)) or chunk)
    with pytest.raises(AttributeError, match="decoder"):  # no model is built here
        build_model(read_model_spec(path), layout, MegatronConfig(dtype="bfloat16"), lora=lora)
    (((config, block), options),) = asked
    return config, block.layer_specs[0], options, chunk


def test_transformer_engine_is_told_of_gemmas_windows_norms_and_frequencies(monkeypatch, layout, paths):
    config, layer, _, chunk = what_megatron_is_told(monkeypatch, layout, paths["gemma3"])
    assert (config.window_size, config.window_attn_skip_freq) == ((7, 0), [1, 0, 1, 0])
    assert config.layernorm_zero_centered_gamma and config.softmax_scale == 1 / 96**0.5
    assert config.activation_func is gelu_tanh and not config.bias_activation_fusion
    parts = layer.submodules
    assert parts.self_attention.module is TwoRopesAttention
    assert parts.self_attn_bda.module is parts.mlp_bda.module is OutputNorm
    spec = read_model_spec(paths["gemma3"])
    frequencies = [rotary_frequencies(spec), rotary_frequencies(spec.of_local_layers())]
    assert torch.equal(chunk.rotary_pos_emb.inv_freq, torch.cat(frequencies)) and not torch.equal(*frequencies)
    assert chunk.embedding_scale == 9.8125


def test_transformer_engine_is_told_of_gpt_oss_windows_sinks_biases_and_activation(monkeypatch, layout, paths):
    config, layer, _, chunk = what_megatron_is_told(monkeypatch, layout, paths["gpt_oss"])
    assert (config.window_size, config.window_attn_skip_freq) == ((7, 0), [1, 0, 1, 0])
    assert config.softmax_type == "learnable" and config.add_bias_linear and config.moe_grouped_gemm
    assert (config.activation_func, config.activation_func_clamp_value, config.glu_linear_offset) == (quick_gelu, 1, 1)
    assert not config.bias_activation_fusion and not config.bias_dropout_fusion
    assert layer.submodules.self_attention.module is SelfAttention  # all layers rotate alike
    assert torch.equal(chunk.rotary_pos_emb.inv_freq, rotary_frequencies(read_model_spec(paths["gpt_oss"])))


def test_transformer_engines_norm_stands_apart_before_a_delta_net_and_attention_has_a_gate(monkeypatch, layout, paths):
    apart = []
    monkeypatch.setattr(build, "attention_norm_apart", apart.append)  # asks for the package
    config, layer, options, _ = what_megatron_is_told(monkeypatch, layout, paths["qwen3_5"])
    assert layer.submodules.self_attention.module is GatedDeltaNet and apart == [layer]
    assert config.attention_output_gate and config.layernorm_zero_centered_gamma
    assert options["rotary_percent"] == 6 / 24  # of 96 / 4 dimensions


@pytest.mark.parametrize(
    ("family", "target", "is_grouped"),
    [
        ("gpt_oss", "down_proj", True),  # its experts are no modules
        ("deepseek_v3", "down_proj", False),
        ("deepseek_v3", "q_b_proj", True),
    ],
)
def test_experts_without_adapters_are_one_grouped_product_beside_adapters_too(
    monkeypatch, layout, paths, family, target, is_grouped
):
    """One by one Megatron would add a bias in place to Transformer Engine's output;
    autograd forbids that."""
    monkeypatch.setattr(build, "norms_apart", lambda layer, is_dense: None)  # asks for the package
    lora = LoraSettings(rank=2, alpha=4.0, targets=("o_proj", target), seed=1)
    config = what_megatron_is_told(monkeypatch, layout, paths[family], lora)[0]
    assert config.moe_grouped_gemm == is_grouped


@pytest.mark.parametrize(
    ("settings", "has_engine", "why"),
    [
        ({"use_transformer_engine": "off"}, True, "use_transformer_engine is off"),
        ({"use_transformer_engine": "auto"}, False, "it cannot be imported here (it is not installed)"),
        ({"dtype": "float32"}, True, "dtype is float32"),
    ],
)
def test_sinks_without_a_kernel_are_refused_on_gpus_before_ranks_join(monkeypatch, paths, settings, has_engine, why):
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "HAVE_TE", has_engine)
    monkeypatch.setattr(run_setup.ParallelLayout, "initialize", lambda **options: pytest.fail("it goes on"))
    megatron = [
        f"actor_rollout_ref.actor.megatron.{key}={value}" for key, value in {"dtype": "bfloat16", **settings}.items()
    ]
    config = load_config(None, [f"actor_rollout_ref.model.path={paths['gpt_oss']}", *megatron])
    with pytest.raises(UserError) as error, run_setup.joined_ranks(config, {}, 1.0):
        pass
    (sentence,) = error.value.sentences
    assert all(words in sentence for words in ("GptOss", why, "docs/install.md", "use_transformer_engine to on"))


def test_sinks_are_trained_with_transformer_engine_and_on_cpus_and_models_without_them_anywhere(monkeypatch, paths):
    sinks, none = (read_model_spec(paths[family]) for family in ("gpt_oss", "glm4"))
    off, auto = MegatronConfig(use_transformer_engine="off"), MegatronConfig(dtype="bfloat16")
    build.require_kernel_for_sinks(sinks, off)
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    build.require_kernel_for_sinks(none, off)
    monkeypatch.setattr(build, "HAVE_TE", True)
    build.require_kernel_for_sinks(sinks, auto)


def test_each_rank_has_its_heads_sinks_and_counts_them_in_the_norm(models):
    for layer in models["gpt_oss"].chunks[0].decoder.layers:
        sinks = layer.self_attention.core_attention.softmax_offset
        assert sinks.shape == (4,) and sinks.tensor_model_parallel and sinks.partition_dim == 0
        assert all(not parameter.sequence_parallel for parameter in layer.mlp.experts.parameters())


def test_transformer_engine_is_told_that_glm_4_rotates_a_part(monkeypatch, layout, paths):
    config, layer, options, chunk = what_megatron_is_told(monkeypatch, layout, paths["glm4"])
    assert options["rotary_percent"] == 0.5 and config.apply_rope_fusion and not config.rotary_interleaved
    assert len(chunk.rotary_pos_emb.inv_freq) == 96 // 4 // 2 // 2
    assert layer.submodules.mlp_bda.module is OutputNorm and config.bias_activation_fusion
    assert config.window_size is None and not config.layernorm_zero_centered_gamma


@pytest.mark.parametrize(
    ("capability", "widths", "is_its"),
    [
        ((9, 0), (128, 64, 128), True),  # DeepSeek-V3's
        ((10, 0), (128, 64, 128), True),
        ((12, 0), (128, 64, 128), False),
        ((8, 0), (128, 64, 128), False),  # cuDNN trains no keys above 128 there
        ((9, 0), (16, 8, 16), True),
        ((9, 0), (16, 8, 12), False),
        ((9, 0), (128, 64, 64), False),
    ],
)
def test_transformer_engine_attends_with_keys_wider_than_values_if_it_has_a_kernel(
    monkeypatch, layout, tmp_path, capability, widths, is_its
):
    monkeypatch.setattr(build, "attention_norm_apart", lambda layer: None)  # asks for the package
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    more = dict(zip(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), widths, strict=True))
    path = make_tiny(tmp_path, "deepseek_v3", layers=2, heads=2, more=more)
    _, layer, options, chunk = what_megatron_is_told(monkeypatch, layout, path)
    core = layer.submodules.self_attention.submodules.core_attention
    if not is_its:
        assert core.module is PackedAttention and options["position_embedding_type"] == "none"
        return
    assert core.module is TEDotProductAttention
    assert core.params == {"k_channels": widths[0] + widths[1], "v_channels": widths[2]}
    assert options["position_embedding_type"] == "rope"
    assert torch.equal(chunk.rotary_pos_emb.inv_freq, rotary_frequencies(read_model_spec(path)))


class AttendsAsIts(torch.nn.Module):
    """Takes the inputs of Transformer Engine's attention, rotated by Megatron already, and attends
    as ours does."""

    def __init__(self, k_channels: int, v_channels: int, **options) -> None:
        super().__init__()
        self.widths = k_channels, k_channels, v_channels
        self.ours = PackedAttention(**options, rotary=lambda query, key, *_: (query, key))

    def forward(self, query, key, value, *arguments, **options) -> torch.Tensor:
        assert all(t.is_contiguous() for t in (query, key, value))
        assert (query.size(-1), key.size(-1), value.size(-1)) == self.widths
        return self.ours(query, key, value, *arguments, **options)


@pytest.mark.parametrize("packed", [True, False])
def test_megatron_rotates_a_latent_attention_as_ours_does(monkeypatch, layout, tmp_path, packed):
    path = make_tiny(tmp_path, "deepseek_v3", layers=2, hidden=32, heads=2)
    samples = [sample(0, list(range(3, 30))), sample(1, list(range(9, 20)))]
    answers = []
    for is_its in (False, True):
        monkeypatch.setattr(build, "megatron_rotates", lambda spec, use_te, is_its=is_its: is_its)
        monkeypatch.setattr("megatron_dapo.models.attention.latent_attention.TEDotProductAttention", AttendsAsIts)
        parts = build_model(read_model_spec(path), layout, MegatronConfig(dtype="float32"))
        load_hf_weights(parts, path, layout)
        kinds = {type(layer.self_attention.core_attention) for layer in parts.chunks[0].decoder.layers}
        assert kinds == {AttendsAsIts if is_its else PackedAttention}
        answers.append(log_probs(parts, layout, samples, packed=packed))
    for index in range(2):  # float32, angles of another order of operations
        torch.testing.assert_close(answers[1][index], answers[0][index], rtol=1e-5, atol=1e-5)


def test_beside_transformer_engine_a_latent_attention_is_ours_between_its_products(monkeypatch, layout, paths):
    apart = []
    monkeypatch.setattr(build, "attention_norm_apart", apart.append)  # asks for the package
    config, layer, options, _ = what_megatron_is_told(monkeypatch, layout, paths["deepseek_v3"])
    attention = layer.submodules.self_attention
    assert apart and attention.module is LatentSelfAttention
    assert attention.submodules.core_attention.module is PackedAttention
    assert config.softmax_scale == pytest.approx((0.1 * math.log(4.0) + 1) ** 2 / 24**0.5, rel=1e-12)
    # the attention rotates
    assert config.kv_channels == 12 and options["position_embedding_type"] == "none"


# of the cut's place: which tensors share a flat bucket
@pytest.mark.parametrize("flat_share", [0.0, 0.9, 1.0])
def test_no_bucket_ends_between_the_first_products_of_a_latent_attention(models, layout, flat_share):
    """At the sizes at which it would, if they were tensors like others."""
    specs = WeightSource(models["deepseek_v3"], layout).specs()
    modules = [spec.name.split(".")[-2] for spec in specs]
    assert modules.count("q_a_proj") == 4
    for at in (index for index, module in enumerate(modules) if module == "q_a_proj"):
        size = sum(spec.num_bytes for spec in specs[: at + 1])
        sizes = (specs[at].num_bytes, specs[at].num_bytes + specs[at + 1].num_bytes - 1, size)
        cuts = [_cuts([replace(spec, with_previous=False) for spec in specs], size, flat_share) for size in sizes]
        assert any(cuts)
        assert not any(_cuts(specs, size, flat_share) for size in sizes)


def _cuts(specs: list[TensorSpec], bucket_bytes: int, flat_share: float) -> bool:
    """Return whether a bucket has only one of a layer's two products,
    or not the one behind the other."""
    buckets = plan_buckets(specs, bucket_bytes, int(flat_share * bucket_bytes)).buckets
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(spec.name for spec in specs)
    pairs = {
        spec.name: spec.name.replace("q_a_proj", "kv_a_proj_with_mqa") for spec in specs if ".q_a_proj." in spec.name
    }
    together = {pair for bucket in buckets for pair in pairwise(bucket.names)}
    return not together >= pairs.items()


@pytest.mark.parametrize(("family", "words"), [("deepseek_v3", "latent attention"), ("gemma3", "no windows")])
def test_what_has_no_context_parallelism_on_gpus_is_refused(monkeypatch, paths, family, words):
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "_use_transformer_engine", lambda megatron: True)
    with pytest.raises(UserError, match=f"context_parallel_size is 2, .* {words} .*; set it to 1"):
        build_model(read_model_spec(paths[family]), SimpleNamespace(cp=2), MegatronConfig(dtype="bfloat16"))
