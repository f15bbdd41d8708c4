"""SGLang plug-in: products with FP8 blocks (`rollout.quantization`) in torch.

SGLang multiplies them on a CPU by C++ operators that need AMX. Here the weights that the blocks
stand for are made at each product, in the type of the hidden states, which are not quantized.
"""

import torch
from torch.nn import functional

TARGET = "sglang.srt.layers.quantization.fp8"
BLOCK = 128


def _weights(blocks, scales):
    """Return the weights that blocks [..., N, K] stand for, in float32.

    scales: [..., N / 128, K / 128], rounded up.
    """
    rows, columns = blocks.shape[-2:]
    factors = scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return blocks.float() * factors


def multiply(original, method, layer, x, bias=None):
    """Return the product of x with a layer's blocks."""
    weight = _weights(layer.weight, layer.weight_scale_inv).to(x.dtype)
    return functional.linear(x, weight, bias)


def mix_experts(original, method, layer, dispatch_output):
    """Return the weighted sum of each token's experts; of those on other ranks, whose number is -1
    here, nothing."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    config = method.moe_runner_config
    if (config.activation, config.gemm1_alpha, config.apply_router_weight_on_input) != ("silu", None, False):
        raise NotImplementedError(
            f"SGLang's experts with FP8 blocks on a CPU are asked for {config}, but have SiLU alone."
        )
    x, (factors, numbers, _) = dispatch_output.hidden_states, dispatch_output.topk_output[:3]
    mixed = torch.zeros(x.shape, dtype=factors.dtype)
    for expert in sorted({*numbers.flatten().tolist()} - {-1}):
        up, down = (
            _weights(blocks[expert], scales[expert]).to(x.dtype)
            for blocks, scales in (
                (layer.w13_weight, layer.w13_weight_scale_inv),
                (layer.w2_weight, layer.w2_weight_scale_inv),
            )
        )
        tokens, places = (numbers == expert).nonzero(as_tuple=True)
        gate, linear = functional.linear(x[tokens], up).chunk(2, dim=-1)
        outputs = functional.linear(functional.silu(gate) * linear, down)
        mixed.index_add_(0, tokens, factors[tokens, places, None] * outputs)
    return StandardCombineInput(hidden_states=mixed.to(x.dtype))


def as_weights(original, blocks, scales, block_size):
    """Return the weights and a scale of 1 for DeepSeek-V3's kv_b_proj, which SGLang quantizes once
    more for kernels of GPUs."""
    return _weights(blocks, scales), 1.0


def keep_blocks(original, method, layer):
    """Do nothing where SGLang repacks weights for AMX, after each push."""


def with_float32(original, config):
    """Return SGLang's types and float32, in which CPU servers compute and its kernels do not."""
    return [*original(config), torch.float32]


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    for method, product in (("Fp8LinearMethod", multiply), ("Fp8MoEMethod", mix_experts)):
        run_inside(f"{TARGET}.{method}.apply", product)
        run_inside(f"{TARGET}.{method}.process_weights_after_loading", keep_blocks)
    run_inside(f"{TARGET}.Fp8Config.get_supported_act_dtypes", with_float32)
    run_inside(f"{TARGET}_utils.block_quant_to_tensor_quant", as_weights)
