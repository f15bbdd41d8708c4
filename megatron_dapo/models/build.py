"""Builds this rank's part of a model: Megatron's GPTModel with our layers and our head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.estimates.hardware import lack_of_fp8
from megatron_dapo.estimates.pipeline import PipelineSplit, pipeline_split
from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import expert_modules
from megatron_dapo.models.attention.delta_kernels import require_delta_kernels
from megatron_dapo.models.attention.delta_net import put_delta_net
from megatron_dapo.models.attention.latent_attention import put_latent_attention, suits_transformer_engine
from megatron_dapo.models.attention.rotary import Rotary, rotary_frequencies
from megatron_dapo.models.chunk import ModelChunk
from megatron_dapo.models.expert_load import ChunkLoad
from megatron_dapo.models.layers import (
    ProductRoundedNorm,
    RMSNorm,
    Router,
    TwoRopesAttention,
    local_layer_spec,
    mark,
    norm_outputs,
    submodules_of,
)
from megatron_dapo.models.log_prob_head import LogProbHead
from megatron_dapo.models.lora import add_adapters
from megatron_dapo.models.megatron_settings import transformer_config
from megatron_dapo.models.router_replay import ChunkReplay
from megatron_dapo.models.user_buffers import make_user_buffers
from megatron_dapo.models.value_head import ValueHead
from megatron_dapo.models.weight_map import expert_parameters
from megatron_dapo.platform import transformer_engine
from megatron_dapo.platform.device import device, is_gpu, model_dtype
from megatron_dapo.platform.parallel import ParallelLayout


@dataclass(frozen=True)
class ModelParts:
    """This rank's model chunks and their shared configuration."""

    chunks: list[ModelChunk]  # one, or one per virtual stage, in pipeline order
    config: TransformerConfig
    spec: ModelSpec
    uses_transformer_engine: bool
    lora: LoraSettings | None = None  # of the adapters, if only these are trained

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Return the numbers, from 0, of this rank's layers with experts, chunk after chunk."""
        return tuple(layer.layer_number - 1 for chunk in self.chunks for layer in layers_with_experts(chunk))

    @property
    def head(self) -> LogProbHead | ValueHead | None:
        """Return the head on the last pipeline stage, None on the others."""
        last = self.chunks[-1]
        return last.output_layer if last.post_process else None


def build_model(
    spec: ModelSpec,
    layout: ParallelLayout,
    megatron: MegatronConfig,
    *,
    head_chunk_size: int = 1024,
    fused_head: bool = True,
    for_training: bool = True,
    num_tokens: int | None = None,
    replay_routers: bool = False,
    lora: LoraSettings | None = None,
) -> ModelParts:
    """Build this rank's part on its device, with meaningless values.

    Load weights next (`load_hf_weights`). A critic's spec gets a value head of zeros.

    Args:
        fused_head: kernels compiled on the machine work here; on a GPU the activation is one, too.
        for_training: false saves time and memory for a model without gradients.
        num_tokens: the same number in each micro-batch, for tp_comm_overlap.
        replay_routers: a mixture's routers take the experts given with a micro-batch.
        lora: freeze the weights and put adapters beside them; new adapters change nothing.
    """
    use_te = _use_transformer_engine(megatron)
    if layout.cp > 1 and is_gpu() and not use_te:
        raise UserError(
            f"{MEGATRON}.context_parallel_size is {layout.cp}, which on GPUs needs Transformer Engine and bfloat16; "
            "install it and set use_transformer_engine to on, or context_parallel_size to 1."
        )
    require_delta_kernels(spec, megatron)
    if layout.cp > 1 and is_gpu() and spec.windows is not None:
        raise UserError(
            f"{MEGATRON}.context_parallel_size is {layout.cp}, but Transformer Engine's ring attention has no windows "
            f"({spec.family}); set it to 1."
        )
    for name, part in (("gated delta net", spec.delta_net), ("latent attention", spec.latent)):
        if layout.cp > 1 and is_gpu() and part is not None:
            raise UserError(
                f"{MEGATRON}.context_parallel_size is {layout.cp}, but a {name} ({spec.family}) has none on GPUs yet; "
                "set it to 1."
            )
    if megatron.tp_comm_overlap:
        assert num_tokens is not None, "buffers have one length"
        make_user_buffers(num_tokens // layout.cp, spec.hidden_size, layout.tp)
    split = pipeline_split(spec.num_layers, layout.pp, layout.num_model_chunks, megatron.pipeline_layers)
    config = transformer_config(spec, layout, megatron, split, use_te, for_training, fused=fused_head and is_gpu())
    if lora is not None and not expert_modules(spec).isdisjoint(lora.targets):
        config.moe_grouped_gemm = False  # it leaves no place for the adapter of one expert
    chunks = [
        _build_chunk(spec, layout, config, split, use_te, stage if layout.vpp else None, has_adapters=lora is not None)
        for stage in range(layout.num_model_chunks)
    ]
    for chunk in chunks:
        if chunk.post_process and spec.value_head:
            chunk.output_layer = ValueHead(config, chunk.output_layer.tp_group)
        elif chunk.post_process:
            chunk.output_layer = LogProbHead(chunk.output_layer, spec.vocab_size, head_chunk_size, fused_head)
        if is_gpu():
            chunk.cuda()
        _mark_experts(chunk)
        _mark_sinks(chunk)
        if lora is not None:
            add_adapters(chunk, spec, layout, lora)
        if spec.moe is not None:
            chunk.expert_load = ChunkLoad([layer.mlp.router for layer in layers_with_experts(chunk)])
    if replay_routers:
        _replay_routers(chunks)
    return ModelParts(chunks, config, spec, use_te, lora)


def _replay_routers(chunks: list[ModelChunk]) -> None:
    first = 0
    for chunk in chunks:
        routers = [layer.mlp.router for layer in layers_with_experts(chunk)]
        chunk.router_replay = ChunkReplay(routers, first)
        first += len(routers)


def layers_with_experts(chunk: ModelChunk) -> list[TransformerLayer]:
    """Return a chunk's layers with a mixture of experts, in their order."""
    return [layer for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]


def _use_transformer_engine(megatron: MegatronConfig) -> bool:
    """Return whether to build Transformer Engine's layers.

    They need bfloat16: the packed attention has no float32 kernel. Raises UserError for a setting
    that requires them in a place without support.
    """
    lack = _lack_of_transformer_engine(megatron)
    needs = f"which needs a GPU, dtype bfloat16 and a transformer_engine that Megatron-core can load, but {lack}"
    if megatron.use_transformer_engine == "on" and lack:
        raise UserError(f"{MEGATRON}.use_transformer_engine is on, {needs}; cure that, or use auto.")
    if megatron.tp_comm_overlap and lack:
        raise UserError(f"{MEGATRON}.tp_comm_overlap is true, {needs}; cure that, or set it to false.")
    if megatron.fp8 != "none" and lack:
        raise UserError(f"{MEGATRON}.fp8 is {megatron.fp8}, {needs}; cure that, or set fp8 to none.")
    if megatron.fp8 != "none":
        _check_fp8(megatron)
    return lack is None and megatron.use_transformer_engine != "off"


def _lack_of_transformer_engine(megatron: MegatronConfig) -> str | None:
    """Return the reason against Transformer Engine's layers here, or None."""
    if not is_gpu():
        return "torch finds no GPU here"
    if model_dtype(megatron.dtype) != torch.bfloat16:
        return f"dtype is {megatron.dtype}"
    if not HAVE_TE:
        why = transformer_engine.import_error()
        return f"it cannot be imported here ({why or 'Megatron-core does not take this version'})"
    return None


def require_kernel_for_sinks(spec: ModelSpec, megatron: MegatronConfig) -> None:
    """Raise UserError for attention sinks on a GPU without Transformer Engine.

    Torch has no kernel for sinks. It keeps the products of all pairs of a segment's tokens: 102 GB
    in one layer of gpt-oss at 20k tokens.
    """
    if not spec.attention_sinks or not is_gpu() or _use_transformer_engine(megatron):
        return
    lack = _lack_of_transformer_engine(megatron) or f"{MEGATRON}.use_transformer_engine is off"
    raise UserError(
        f"{spec.family} has attention sinks, for which only Transformer Engine has a kernel on GPUs, but {lack}; "
        f"install it (docs/install.md), and set {MEGATRON}.use_transformer_engine to on and dtype to bfloat16."
    )


def _check_fp8(megatron: MegatronConfig) -> None:
    lack = lack_of_fp8(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), megatron.fp8_recipe)
    if lack is not None:
        raise UserError(f"{MEGATRON}.fp8 is {megatron.fp8} with fp8_recipe {megatron.fp8_recipe}, {lack}")


def _mark_experts(chunk: ModelChunk) -> None:
    """Mark the experts' parameters for the reduction over groups of their own.

    Megatron does so only with EP > 1. With TP > 1 and EP 1, the gradients of the tensor-parallel
    ranks' tokens would stay unsummed.
    """
    for parameter in expert_parameters(chunk):
        # The second mark is for the norm: it counts on every rank of their groups. Transformer
        # Engine's experts lack it with EP > 1. The third exempts an expert's bias: Megatron sums
        # biases of row-parallel products over TP ranks.
        mark(parameter, allreduce=False, tensor_model_parallel=True, sequence_parallel=False)


def _mark_sinks(chunk: ModelChunk) -> None:
    """Mark the sinks as cut by heads over tensor-parallel ranks: each rank's count in the norm."""
    for layer in chunk.decoder.layers:
        core = getattr(layer.self_attention, "core_attention", None)  # a delta net has none
        sinks = getattr(core, "softmax_offset", None)
        if sinks is not None:
            set_tensor_model_parallel_attributes(sinks, True, 0, 1)


def norms_apart(layer: ModuleSpec, is_dense: bool) -> None:
    """Separate Transformer Engine's norms from the products behind them: adapters need their
    inputs.

    The norm before experts is separate already.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    parts = layer.submodules
    engine = TESpecProvider()
    attention_norm_apart(layer)
    parts.pre_mlp_layernorm = engine.layer_norm()
    if is_dense:
        submodules_of(parts.mlp).linear_fc1 = engine.column_parallel_linear()


def attention_norm_apart(layer: ModuleSpec) -> None:
    """Separate Transformer Engine's norm before the attention from the product behind it."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    engine = TESpecProvider()
    layer.submodules.input_layernorm = engine.layer_norm()
    layer.submodules.self_attention.submodules.linear_qkv = engine.column_parallel_linear()


def _block_spec(
    spec: ModelSpec, config: TransformerConfig, use_te: bool, numbers: Sequence[int], has_adapters: bool
) -> TransformerBlockSubmodules:
    """Return the parts of the layers with these numbers, from 0, and the norm after the last of
    all."""
    num_experts = spec.moe.num_experts if spec.moe else None
    rotary = Rotary(spec, device())
    norm = ProductRoundedNorm if spec.product_rounded_norms else RMSNorm
    make: Callable[[int | None], ModuleSpec]
    if use_te:
        make = partial(_transformer_engine_layer, spec, config, has_adapters)
    else:
        local = spec.of_local_layers()
        local_rotary = Rotary(local, device()) if local else None
        make = partial(
            local_layer_spec,
            spec.qk_norm,
            rotary=rotary,
            local_rotary=local_rotary,
            linear_biases=spec.linear_biases,
            norm=norm,
        )
    kind_of = {number: (spec.has_experts(number), spec.has_attention(number)) for number in numbers}
    kinds = {kind: make(num_experts if kind[0] else None) for kind in {*kind_of.values()}}
    if spec.latent is not None:
        for layer in kinds.values():
            put_latent_attention(layer, spec.latent, None if megatron_rotates(spec, use_te) else rotary)
    if spec.delta_net is not None:
        for layer in (layer for (_, has_attention), layer in kinds.items() if not has_attention):
            if use_te and not has_adapters:
                attention_norm_apart(layer)
            put_delta_net(layer, spec.delta_net)
    if spec.output_norms:
        for layer in kinds.values():
            norm_outputs(layer, config)
    return TransformerBlockSubmodules(
        layer_specs=[kinds[kind_of[number]] for number in numbers],
        layer_norm=LayerNormImpl if use_te else norm,
    )


def megatron_rotates(spec: ModelSpec, use_te: bool) -> bool:
    """Return whether Megatron rotates queries and keys before Transformer Engine's attention.

    Otherwise our attention rotates and attends.
    """
    return use_te and (spec.latent is None or suits_transformer_engine(spec.latent))


def _transformer_engine_layer(
    spec: ModelSpec, config: TransformerConfig, has_adapters: bool, num_experts: int | None
) -> ModuleSpec:
    is_grouped = bool(num_experts) and config.moe_grouped_gemm
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=is_grouped, qk_layernorm=spec.qk_norm
    )
    # a norm has one name in checkpoints, inside the product behind it or separate
    local = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.sharded_state_dict_keys_map = local.submodules.sharded_state_dict_keys_map
    if has_adapters:
        norms_apart(layer, is_dense=not num_experts)
    elif spec.latent is not None:
        attention_norm_apart(layer)
    if num_experts:
        submodules_of(layer.submodules.mlp).router = Router
    if spec.of_local_layers():
        layer.submodules.self_attention.module = TwoRopesAttention
    return layer


def _build_chunk(
    spec: ModelSpec,
    layout: ParallelLayout,
    config: TransformerConfig,
    split: PipelineSplit,
    use_te: bool,
    vp_stage: int | None,
    *,
    has_adapters: bool,
) -> ModelChunk:
    number = layout.pp_rank + layout.pp * (vp_stage or 0)
    rotates = megatron_rotates(spec, use_te)
    chunk = ModelChunk(
        config,
        _block_spec(spec, config, use_te, split.numbers(number), has_adapters),
        vocab_size=spec.padded_vocab_size(layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=number == 0,
        post_process=number == len(split.layers) - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope" if rotates else "none",  # our attention rotates by itself
        rotary_percent=spec.rotary_dim / spec.head_dim,
        vp_stage=vp_stage,
    )
    if rotates:  # Megatron lacks some kinds of scaling and some of their settings
        specs = [each for each in (spec, spec.of_local_layers()) if each]
        chunk.rotary_pos_emb.inv_freq = torch.cat([rotary_frequencies(each) for each in specs]).to(device())
    if spec.embedding_scale != 1:
        chunk.embedding_scale = torch.tensor(spec.embedding_scale).to(config.params_dtype).item()
    built = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # Megatron counts from 1
    assert built == list(split.numbers(number)), f"Megatron built layers {built} as chunk {number} of {split}"
    return chunk
