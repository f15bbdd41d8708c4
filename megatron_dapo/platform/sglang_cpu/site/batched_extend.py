"""SGLang plug-in: attention of prompts in the torch_native backend, one call for all requests of like lengths."""

import torch
from torch.nn.functional import scaled_dot_product_attention

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"


def batched_extend(
    original,
    backend,
    query,
    output,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_prefix_lens,
    extend_seq_lens,
    encoder_lens=None,
    scaling=None,
    enable_gqa=False,
    causal=False,
    is_cross_attn=False,
    sliding_window_size=None,
):
    """The new tokens of each request against its cached keys and values, which end with theirs; what it does not cover
    goes to `original`.

    query [T, Hq, D], output [T, Hq, Dv], the requests one after the other; caches [num_slots, Hkv, D | Dv],
    req_to_token [num_requests, max_context], the others [B]: seq_lens = extend_prefix_lens (cached before) +
    extend_seq_lens (new). Writes and returns output. `original` makes a call per request, which computes the rows of
    cached positions as well.
    """
    if encoder_lens is not None or sliding_window_size is not None or not causal:
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens=encoder_lens,
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )
    news = extend_seq_lens.tolist()
    starts = (extend_seq_lens.cumsum(0) - extend_seq_lens).tolist()
    alike = {}  # (cached, new) -> the requests
    for number, lengths in enumerate(zip(extend_prefix_lens.tolist(), news, strict=True)):
        alike.setdefault(lengths, []).append(number)
    for (num_cached, num_new), numbers in alike.items():
        first_N = torch.tensor([starts[number] for number in numbers], device=query.device)
        places_NS = first_N[:, None] + torch.arange(num_new, device=query.device)
        slots_NL = req_to_token[req_pool_indices[numbers], : num_cached + num_new].long()
        keys, values = (_of_slots(cache, slots_NL).to(query.dtype) for cache in (k_cache, v_cache))
        mask = None
        if num_cached:
            mask = torch.ones(num_new, num_cached + num_new, dtype=torch.bool, device=query.device).tril(num_cached)
        attended = scaled_dot_product_attention(
            query[places_NS].transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=enable_gqa,
        )
        output[places_NS] = attended.transpose(1, 2)
    return output


def _of_slots(cache, slots_NL):
    """Return [N, Hkv, L, D] of a cache [num_slots, Hkv, D]; index_select takes a sixth of the time of cache[slots]."""
    rows = cache.flatten(1).index_select(0, slots_NL.flatten())
    return rows.view(*slots_NL.shape, *cache.shape[1:]).transpose(1, 2)


def register():
    """SGLang calls this once, before it makes its processes: as forks they inherit what is changed."""
    from replacing import run_inside

    run_inside(TARGET, batched_extend)
