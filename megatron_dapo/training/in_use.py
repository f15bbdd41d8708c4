"""Names the trainer's layers, attention, head and optimizer, which differ between installations."""

import importlib.metadata
from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.models.attention.delta_net import GatedDeltaNet
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.layers import PackedAttention
from megatron_dapo.platform import transformer_engine
from megatron_dapo.platform.device import is_gpu
from megatron_dapo.training.optimizer import TrainingState


def in_use(model: ModelParts, state: TrainingState) -> str:
    """Return one line about this rank, read from the built objects, not from the config."""
    return "trainer: " + ", ".join(_parts(model, state))


def _parts(model: ModelParts, state: TrainingState) -> Iterator[str]:
    config = model.config
    if model.uses_transformer_engine:
        yield f"layers of Transformer Engine {importlib.metadata.version('transformer_engine')}"
    else:
        error = transformer_engine.look().error if is_gpu() else None
        why = f"Transformer Engine cannot be imported: {error}" if error else "no Transformer Engine"
        yield f"layers of our own ({why})"
    layers = (layer for chunk in model.chunks for layer in chunk.decoder.layers)
    yield from sorted({_attention(layer.self_attention) for layer in layers})
    yield "fused SwiGLU" if config.bias_activation_fusion else "plain SwiGLU"
    yield f"weights in {str(config.params_dtype).removeprefix('torch.')}" + (
        f", FP8 {config.fp8}" if config.fp8 else ""
    )
    if config.recompute_granularity:
        yield f"{_recomputed(config)} recomputed in backward"
    if model.head is not None and not model.spec.value_head:
        yield f"{'fused' if model.head.is_fused else 'composed'} log-prob head"
    yield f"optimizer {' and '.join(sorted(set(_optimizers(state))))}"


def _attention(attention: torch.nn.Module) -> str:
    """Return the name of a layer's attention, or of what stands in its place."""
    if isinstance(attention, GatedDeltaNet):
        is_half = attention.config.params_dtype in (torch.float16, torch.bfloat16)
        return f"gated delta nets {'of flash-linear-attention' if is_gpu() and is_half else 'in torch'}"
    core = attention.core_attention
    if not isinstance(core, PackedAttention):
        return "its attention (flash or fused, as it chooses)"
    is_half = core.config.params_dtype in (torch.float16, torch.bfloat16)
    if is_gpu() and is_half and core.softmax_offset is None:
        return "torch's variable-length flash attention"
    return "torch's attention, segments of like length at once"


def _recomputed(config: TransformerConfig) -> str:
    if config.recompute_granularity == "selective":
        return " and ".join(config.recompute_modules)
    if config.recompute_method == "uniform":
        return "all layers"
    return f"the first {config.recompute_num_layers} layers of each chunk"


def _optimizers(state: TrainingState) -> Iterator[str]:
    """Yield package and class of the weights' optimizers: Megatron takes Transformer Engine's, else
    apex's, else torch's."""
    for each in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
        kind = type(each.optimizer)
        yield f"{kind.__module__.partition('.')[0]} {kind.__name__}"
