"""SGLang plug-in: decode attention of the torch_native backend in one masked SDPA, not request by request in Python."""

import torch
from torch.nn.functional import scaled_dot_product_attention

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"


def batched_decode(
    original,
    backend,
    query,
    output,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    encoder_lens=None,
    scaling=None,
    enable_gqa=False,
    causal=False,
    is_cross_attn=False,
    sliding_window_size=None,
):
    """One query token per request against its cached keys and values; what it does not cover goes to `original`.

    query [B, Hq, D], output [B, Hq, Dv], caches [num_slots, Hkv, D | Dv], req_to_token [num_requests, max_context],
    req_pool_indices, seq_lens [B]. Writes and returns output.
    """
    if encoder_lens is not None or sliding_window_size is not None:
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            encoder_lens=encoder_lens,
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )
    num_kv_heads = k_cache.shape[1]
    longest = int(seq_lens.max())
    exists_BL = torch.arange(longest, device=query.device) < seq_lens[:, None]
    slots_BL = req_to_token[req_pool_indices, :longest]
    # Past a request's end stand slots of others, whose values may be no numbers, and 0 * nan is nan: read its first.
    slots_BL = torch.where(exists_BL, slots_BL, slots_BL[:, :1])
    keys = k_cache[slots_BL].to(query.dtype).transpose(1, 2)  # [B, Hkv, L, D]
    values = v_cache[slots_BL].to(query.dtype).transpose(1, 2)
    grouped = query.unflatten(1, (num_kv_heads, -1))  # the query heads of one KV head stand as its query positions
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=exists_BL[:, None, None, :], scale=scaling)
    output.copy_(attended.flatten(1, 2))
    return output


def register():
    """SGLang calls this once, before it makes its processes: as forks they inherit what is changed."""
    from replacing import run_inside

    run_inside(TARGET, batched_decode)
