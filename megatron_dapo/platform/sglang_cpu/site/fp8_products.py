"""SGLang plug-in: products with FP8 blocks (`rollout.quantization`) in torch.

SGLang multiplies them on a CPU by C++ operators that need AMX. Here the weights that the blocks
stand for are made at each product, in the type of the hidden states, which are not quantized.
"""

from types import SimpleNamespace

import torch

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
    return torch.nn.functional.linear(x, weight, bias)


def mix_experts(original, method, layer, dispatch_output):
    """Return the weighted sum of a token's experts, with blocks for weights; of experts elsewhere,
    whose number is -1 here, nothing."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights = {
        name: _weights(getattr(layer, name), getattr(layer, f"{name}_scale_inv")).to(x.dtype)
        for name in ("w13_weight", "w2_weight")
    }
    chosen = dispatch_output.topk_output
    is_here = chosen.topk_ids >= 0
    chosen = chosen._replace(topk_weights=chosen.topk_weights * is_here, topk_ids=chosen.topk_ids * is_here)
    plain = SimpleNamespace(num_experts=len(weights["w2_weight"]), **weights)
    mixed = moe_forward_native(plain, x, chosen, method.moe_runner_config)
    return StandardCombineInput(hidden_states=mixed)


def as_weights(original, blocks, scales, block_size):
    """Return DeepSeek-V3's kv_b_proj, which SGLang quantizes once more for kernels of GPUs, as
    weights with a scale of 1."""
    return _weights(blocks, scales), 1.0


def keep_blocks(original, method, layer):
    """SGLang repacks weights for AMX after each push."""


def with_float32(original, config):
    """SGLang's kernels take no float32, in which CPU servers compute."""
    return [*original(config), torch.float32]


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    for method, product in (("Fp8LinearMethod", multiply), ("Fp8MoEMethod", mix_experts)):
        run_inside(f"{TARGET}.{method}.apply", product)
        run_inside(f"{TARGET}.{method}.process_weights_after_loading", keep_blocks)
    run_inside(f"{TARGET}.Fp8Config.get_supported_act_dtypes", with_float32)
    run_inside(f"{TARGET}_utils.block_quant_to_tensor_quant", as_weights)
