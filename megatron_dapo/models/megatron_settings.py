"""Megatron's settings of a model: its TransformerConfig, and the layers of its stages."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.estimates.pipeline import PipelineSplit
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.models.attention.rotary import attention_scale
from megatron_dapo.models.layers import ACTIVATIONS
from megatron_dapo.platform.device import is_gpu, model_dtype
from megatron_dapo.platform.parallel import ParallelLayout


def _moe(spec: ModelSpec, layout: ParallelLayout, use_te: bool) -> dict:
    """Return the experts' settings: no token is dropped, only the policy's loss balances the
    load."""
    if spec.moe is None:
        return {}
    sigmoid = dict(
        moe_router_score_function="sigmoid",
        # as in transformers and servers, except for DeepSeek-V3 in bfloat16 on CPUs
        moe_router_dtype="fp32",
        moe_router_topk_scaling_factor=spec.moe.scaling_factor,
        moe_router_num_groups=spec.moe.num_groups,
        moe_router_group_topk=spec.moe.groups_per_token,
    )
    return dict(
        num_moe_experts=spec.moe.num_experts,
        moe_router_topk=spec.moe.experts_per_token,
        moe_ffn_hidden_size=spec.ffn_size,
        moe_shared_expert_intermediate_size=spec.moe.shared_ffn_size or None,
        moe_shared_expert_gate=spec.moe.shared_gate,
        **(sigmoid if spec.moe.score == "sigmoid" else {}),
        # softmax over the chosen experts is softmax over all, divided by the sum of the chosen
        moe_router_pre_softmax=not spec.moe.norm_topk_prob,
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=use_te,
        moe_permute_fusion=use_te,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


def _windows(spec: ModelSpec) -> dict:
    """Return Megatron's settings of windows. Its size leaves out the token itself."""
    if spec.windows is None:
        return {}
    return dict(
        window_size=(spec.windows.size - 1, 0),
        window_attn_skip_freq=[int(is_local) for is_local in spec.windows.is_local],
    )


def _recompute(megatron: MegatronConfig, spec: ModelSpec) -> dict:
    assert megatron.recompute_granularity != "auto", "estimates/recompute.py says what it stands for"
    if megatron.recompute_granularity == "full":
        return dict(
            recompute_granularity="full",
            recompute_method=megatron.recompute_method,
            recompute_num_layers=megatron.recompute_num_layers,
        )
    if megatron.recompute_granularity == "selective":
        modules: list[str] = list(megatron.recompute_modules)
        # Megatron calls experts "moe"; its dense layers have an "mlp"
        if "mlp" in modules and spec.moe is not None:
            modules += ["moe"]
            if not spec.moe.num_dense_layers:
                modules.remove("mlp")
        return dict(recompute_granularity="selective", recompute_modules=modules)
    return {}


def megatron_layout(split: PipelineSplit) -> list[list[str]] | None:
    """Return each chunk's layers, embedding and head (loss) in Megatron's words; None for one
    stage."""
    if split.num_stages == 1:
        return None
    chunks = [["decoder"] * number for number in split.layers]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def transformer_config(
    spec: ModelSpec,
    layout: ParallelLayout,
    megatron: MegatronConfig,
    split: PipelineSplit,
    use_te: bool,
    for_training: bool,
    fused: bool,
) -> TransformerConfig:
    """Return the settings of a rank's chunks.

    Args:
        use_te: with Transformer Engine's layers.
        fused: kernels compiled on the machine work here.
    """
    dtype = model_dtype(megatron.dtype)
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.dense_ffn_size or spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.value_dim,
        softmax_scale=attention_scale(spec),
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        layernorm_zero_centered_gamma=spec.zero_centered_norms,
        qk_layernorm=spec.qk_norm,
        attention_output_gate=spec.attention_output_gate,
        add_bias_linear=spec.linear_biases,
        add_qkv_bias=spec.qkv_bias,
        softmax_type="learnable" if spec.attention_sinks else "vanilla",
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[spec.activation],
        activation_func_clamp_value=spec.glu_limit,
        glu_linear_offset=0.0 if spec.glu_limit is None else 1.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        pipeline_model_parallel_layout=megatron_layout(split),
        context_parallel_size=layout.cp,  # Megatron's default kind, p2p: keys and values go round
        sequence_parallel=layout.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not is_gpu(),
        # Every parameter is loaded afterwards, but initialization marks the parameters cut over TP
        # ranks. Without the marks the gradient norm counts them wrongly. On a CPU it first makes
        # each whole tensor.
        perform_initialization=for_training,
        # micro-batches differ in length, so pipeline stages tell each other the shape
        variable_seq_lengths=True,
        # Transformer Engine's layers exchange activations in its user buffers while they multiply
        tp_comm_overlap=megatron.tp_comm_overlap,
        # for dense models too: the default refuses the line above
        moe_token_dispatcher_type="alltoall",
        # the loss function returns (sum, count); only Megatron divides the gradients, by the global
        # count
        calculate_per_token_loss=True,
        # torch.compile makes SwiGLU one kernel forward and one backward, in Transformer Engine's
        # layers, too
        bias_activation_fusion=fused and spec.activation == "silu",
        # without dropout there is little to fuse; attention is never Megatron's own masked softmax
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # asks for apex because of the unused output layer; training/optimizer.py turns it on
        gradient_accumulation_fusion=False,
        persist_layer_norm=use_te,
        apply_rope_fusion=use_te,
        # interleaved pipelining on gloo and NCCL alike: separate sends and receives
        **(dict(overlap_p2p_comm=True, batch_p2p_comm=False) if layout.vpp else {}),
        **_windows(spec),
        **_moe(spec, layout, use_te),
        **_recompute(megatron, spec),
        **_fp8(megatron),
    )


def _fp8(megatron: MegatronConfig) -> dict:
    return {} if megatron.fp8 == "none" else dict(fp8=megatron.fp8, fp8_recipe=megatron.fp8_recipe)
