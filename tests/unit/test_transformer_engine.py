"""Without Transformer Engine: our layers instead, errors with key and cure;
its names in the weight map."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from megatron_dapo.checkpointing.torch_dist.slices import model_regions
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import tokens_multiple
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig, OptimConfig
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models import build
from megatron_dapo.models.attention.rotary import attention_scale, rotary_frequencies
from megatron_dapo.models.build import build_model
from megatron_dapo.models.weight_map import weight_entries
from megatron_dapo.platform.transformer_engine import EngineHere
from megatron_dapo.training import in_use as in_use_module
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.in_use import in_use
from megatron_dapo.training.optimizer import make_training_state
from tests.families import FAMILIES
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

# after megatron_dapo.models, which prepares megatron.core for this machine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # isort: skip
from megatron.core.models.gpt import gpt_layer_specs  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", layers=2, hidden=16, heads=2))


@pytest.mark.parametrize("wanted", ["auto", "off"])
def test_without_it_the_layers_are_ours(layout, model_path, wanted):
    model = build_model(read_model_spec(model_path), layout, MegatronConfig(use_transformer_engine=wanted))
    (chunk,) = model.chunks
    classes = {type(module).__name__ for module in chunk.decoder.modules()}
    assert not model.uses_transformer_engine and {"PackedAttention", "RMSNorm"} <= classes
    assert not any(name.startswith("TE") for name in classes)
    assert chunk.position_embedding_type == "none"  # PackedAttention rotates: nobody else may


def test_a_run_says_which_layers_attention_and_optimizer_it_uses(layout, model_path, monkeypatch):
    model = build_model(read_model_spec(model_path), layout, MegatronConfig())
    state = make_training_state(model, MegatronConfig(), OptimConfig(), 1)
    sentence = in_use(model, state)
    for part in (
        "layers of our own",
        "attention, segments of like length at once",
        "fused log-prob head",
        "float32",
        "torch AdamW",
    ):
        assert part in sentence
    assert "\n" not in sentence
    monkeypatch.setattr("importlib.metadata.version", {"transformer_engine": "2.20.2"}.get)
    engine = "layers of Transformer Engine 2.20.2, "
    beside_its_products = replace(model, uses_transformer_engine=True)
    assert f"{engine}torch's attention, segments" in in_use(beside_its_products, state)
    monkeypatch.setattr(model.chunks[0].decoder.layers[0].self_attention, "core_attention", torch.nn.Identity())
    monkeypatch.setattr(model.chunks[0].decoder.layers[1].self_attention, "core_attention", torch.nn.Identity())
    assert f"{engine}its attention (flash or fused" in in_use(beside_its_products, state)


def test_a_run_says_that_sinks_are_not_for_flash_attention(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(in_use_module, "is_gpu", lambda: True)
    megatron = MegatronConfig(dtype="bfloat16")
    for family, words in (("gpt_oss", "torch's attention, segments of"), ("qwen3", "torch's variable-length flash")):
        path = make_tiny(tmp_path / family, family, layers=1, hidden=16, heads=2)
        model = build_model(read_model_spec(path), layout, megatron)
        assert words in in_use(model, make_training_state(model, megatron, OptimConfig(), 1))


def test_a_run_that_goes_on_without_it_says_why_it_cannot_be_imported(layout, model_path, monkeypatch):
    model = build_model(read_model_spec(model_path), layout, MegatronConfig())
    state = make_training_state(model, MegatronConfig(), OptimConfig(), 1)
    monkeypatch.setattr(in_use_module, "is_gpu", lambda: True)
    for here, words in (
        (EngineHere(), "(no Transformer Engine)"),
        (EngineHere("2.18.0", "ImportError: libcudnn.so.9"), "cannot be imported: ImportError: libcudnn.so.9)"),
    ):
        monkeypatch.setattr(in_use_module.transformer_engine, "look", lambda here=here: here)
        assert words in in_use(model, state)


@pytest.mark.parametrize(
    ("wanted", "expected"), [("on", "refuse"), ("off", "no Transformer Engine"), ("auto", "else our own")]
)
def test_the_plan_says_which_layers_a_run_will_have(wanted, expected):
    plan = process_plan(load_config(None, [f"{MEGATRON}.use_transformer_engine={wanted}"]))
    (line,) = [line for line in plan.splitlines() if "Transformer Engine" in line]
    assert expected in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_transformer_engine": "on"}, ["use_transformer_engine is on", "use auto"]),
        ({"fp8": "hybrid"}, [f"{MEGATRON}.fp8 is hybrid", "set fp8 to none"]),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, [f"{MEGATRON}.fp8 is e4m3", "set fp8 to none"]),
    ],
)
def test_requiring_it_without_support_is_an_error_with_the_cure(model_path, settings, words):
    with pytest.raises(UserError) as error:
        build_model(read_model_spec(model_path), None, MegatronConfig(**settings))
    (sentence,) = error.value.sentences
    assert all(word in sentence for word in [*words, "needs a GPU", "transformer_engine"]), sentence


def test_a_gpu_that_lacks_the_recipe_of_fp8_is_refused_with_those_it_has(monkeypatch, model_path):
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    settings = {"fp8": "hybrid", "dtype": "bfloat16"}
    assert build._use_transformer_engine(MegatronConfig(**settings, fp8_recipe="blockwise"))
    with pytest.raises(UserError) as error:
        build._use_transformer_engine(MegatronConfig(**settings, fp8_recipe="mxfp8"))
    (sentence,) = error.value.sentences
    assert "needs compute capability 10.0, but NVIDIA H100 80GB HBM3 has 9.0" in sentence
    assert "set fp8_recipe to tensorwise or delayed or blockwise" in sentence


def as_named_by_transformer_engine(name: str, spec: ModelSpec) -> str:
    """Its layers hold the norm before a product inside the product's module,
    and all experts in one."""
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer and spec.has_experts(int(layer[1])):
        return re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.(weight|bias))", r"\2\1", name)
    return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weight_map_knows_both_namings(layout, tmp_path, family):
    spec = read_model_spec(make_tiny(tmp_path, family, layers=2, hidden=16, heads=2))
    (chunk,) = build_model(spec, layout, MegatronConfig()).chunks

    class Renamed:
        """The same chunk under Transformer Engine's names."""

        decoder = chunk.decoder

        def named_parameters(self):
            return [(as_named_by_transformer_engine(name, spec), p) for name, p in chunk.named_parameters()]

    assert {name for name, _ in Renamed().named_parameters()} != {name for name, _ in chunk.named_parameters()}
    own, renamed = weight_entries([chunk], spec), weight_entries([Renamed()], spec)
    assert [entry.hf_names for entry in own] == [entry.hf_names for entry in renamed]
    assert all(a.parameter is b.parameter and a.transform is b.transform for a, b in zip(own, renamed, strict=True))


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_norm_has_one_name_in_checkpoints_apart_from_the_product_behind_it_too(
    layout, tmp_path, monkeypatch, family, has_adapters
):
    """So a run with its layers starts from the checkpoint of one with ours,
    and one with adapters from either."""
    # absent as the package is
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", TESpecProvider, raising=False)
    monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version("2.20"))
    spec = read_model_spec(make_tiny(tmp_path, family, layers=1, hidden=16, heads=2))
    model = build_model(spec, layout, MegatronConfig())
    stored = {region.name for regions in model_regions(model, layout).values() for region in regions}
    num_experts = spec.moe.num_experts if spec.moe else None
    parts = build._transformer_engine_layer(spec, model.config, has_adapters, num_experts).submodules
    apart = [name for name in ("input_layernorm.", "pre_mlp_layernorm.") if getattr(parts, name[:-1]) is not IdentityOp]
    assert len(apart) == (2 if has_adapters else 0 if num_experts is None else 1)
    assert {f"decoder.layers.0.{parts.sharded_state_dict_keys_map[name]}weight" for name in apart} <= stored


@pytest.mark.parametrize(
    ("recipe", "multiple"), [("tensorwise", 16), ("delayed", 16), ("mxfp8", 32), ("blockwise", 128)]
)
@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_are_padded_for_fp8_products(layout, model_path, recipe, multiple, packed):
    config = load_config(
        None,
        [
            "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.max_tokens_per_microbatch=256", f"{MEGATRON}.fp8=hybrid",
            f"{MEGATRON}.fp8_recipe={recipe}", f"actor_rollout_ref.model.use_remove_padding={str(packed).lower()}",
        ],
    )  # fmt: skip
    assert tokens_multiple(config, 1) == multiple
    distribute = StepDistributor(config, layout, read_model_spec(model_path))
    (mini_batch,) = distribute(0, synthetic_groups(60, num_groups=2)).mini_batches
    assert all(batch.tokens.size(1) % multiple == 0 and batch.tokens.numel() <= 256 for batch in mini_batch)
    assert sum(len(batch.sample_ids) for batch in mini_batch) == 8


def test_without_fp8_nothing_is_padded_for_it():
    assert tokens_multiple(load_config(None, []), 1) == 1


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_megatron_knows_every_recipe(recipe):
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    config = load_config(None, [f"{MEGATRON}.fp8=hybrid", f"{MEGATRON}.fp8_recipe={recipe}"])
    assert tokens_multiple(config, 1) % get_fp8_align_size(Fp8Recipe(recipe)) == 0


@pytest.mark.parametrize("kind", ["none", "e4m3", "hybrid"])
def test_where_it_can_be_loaded_its_layers_and_fp8_are_asked_of_megatron(layout, model_path, monkeypatch, kind):
    """On a machine that says it has both; building the layers needs the package itself."""
    asked, chunk = [], SimpleNamespace(rotary_pos_emb=SimpleNamespace())
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb", print)
    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb_thd", print)
    layers, made = [], []

    def its_layer(**options) -> SimpleNamespace:
        layers.append(options)
        made.append(SimpleNamespace(submodules=SimpleNamespace()))
        return made[-1]

    monkeypatch.setattr(build, "get_gpt_layer_with_transformer_engine_spec", its_layer)
    monkeypatch.setattr(build, "ModelChunk", lambda *arguments, **options: asked.append((arguments, options)) or chunk)
    megatron = MegatronConfig(fp8=kind, fp8_recipe="blockwise" if kind == "e4m3" else "tensorwise", dtype="bfloat16")
    with pytest.raises(AttributeError, match="decoder"):  # no model is built here
        build_model(read_model_spec(model_path), layout, megatron)
    (((config, block), options),) = asked
    assert layers == [{"qk_layernorm": True, "num_experts": None, "moe_grouped_gemm": False}]
    assert block.layer_specs == [made[0]] * 2
    assert options["position_embedding_type"] == "rope"
    spec = read_model_spec(model_path)
    assert torch.equal(chunk.rotary_pos_emb.inv_freq, rotary_frequencies(spec))
    assert config.softmax_scale == attention_scale(spec)
    assert (
        config.bias_activation_fusion
        and config.apply_rope_fusion
        and config.normalization == "RMSNorm"
        and not config.fp8_param
    )
    assert config.fp8 == (None if kind == "none" else kind)
    assert kind == "none" or config.fp8_recipe == megatron.fp8_recipe
