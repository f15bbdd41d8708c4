"""SGLang plug-in: attention of prompts in the torch_native backend, one call for all requests of
like lengths."""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

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
    """Attend the new tokens of each request to its cached keys and values, which end with the new
    ones; unsupported cases go to `original`.

    query [T, Hq, D], output [T, Hq, Dv], the requests one after the other. Caches [num_slots, Hkv,
    D | Dv], req_to_token [num_requests, max_context], the others [B]. seq_lens = extend_prefix_lens
    (cached before) + extend_seq_lens (new). Each token sees itself and sliding_window_size tokens
    before it, or all before it. `attention_sinks` may have left sinks, [Hq], with the backend.
    Writes and returns output. `original` makes a call per request, and computes the rows of cached
    positions as well.
    """
    if encoder_lens is not None or not causal:
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
    sinks = vars(backend).pop("sinks", None)
    for (num_cached, num_new), numbers in alike.items():
        first_N = torch.tensor([starts[number] for number in numbers], device=query.device)
        places_NS = first_N[:, None] + torch.arange(num_new, device=query.device)
        num_seen = num_cached if sliding_window_size is None else min(num_cached, sliding_window_size)
        slots_NL = req_to_token[req_pool_indices[numbers], num_cached - num_seen : num_cached + num_new].long()
        keys, values = (_of_slots(cache, slots_NL).to(query.dtype) for cache in (k_cache, v_cache))
        mask = _mask(num_seen, num_new, sliding_window_size)
        attended = _attend(query[places_NS].transpose(1, 2), keys, values, mask, sinks, scaling)
        output[places_NS] = attended.transpose(1, 2)
    return output


def _mask(num_seen, num_new, window):
    """Return the attention mask of the new tokens over cached and new ones, [S, L]; None: causal
    over new tokens only."""
    if not num_seen and (window is None or window >= num_new - 1):
        return None
    mask = torch.ones(num_new, num_seen + num_new, dtype=torch.bool).tril(num_seen)
    return mask if window is None else mask.triu(num_seen - window)


def _attend(query, keys, values, mask, sinks, scaling):
    """Return scaled_dot_product_attention [N, Hq, S, D], with a sink per query head in the softmax.

    The sink is one more key, seen by all, with the value 0. One more dimension has the sink in the
    queries, 1 in that key and 0 in the others.
    """
    num_new, size = query.shape[-2:]
    scaling = size**-0.5 if scaling is None else scaling
    grouped = dict(scale=scaling, enable_gqa=query.shape[1] != keys.shape[1])
    if sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None, **grouped)
    if mask is None:
        mask = torch.ones(num_new, num_new, dtype=torch.bool).tril()
    sink = (sinks.float() / scaling).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    keys, values = pad(keys, (0, 1, 0, 1)), pad(values, (0, 1, 0, 1))
    keys[..., -1, -1] = 1.0
    mask = pad(mask, (0, 1), value=True)
    attended = scaled_dot_product_attention(torch.cat((query, sink), dim=-1), keys, values, attn_mask=mask, **grouped)
    return attended[..., :-1]


def _of_slots(cache, slots_NL):
    """Return [N, Hkv, L, D] of a cache [num_slots, Hkv, D]; index_select takes a sixth of the time
    of cache[slots]."""
    rows = cache.flatten(1).index_select(0, slots_NL.flatten())
    return rows.view(*slots_NL.shape, *cache.shape[1:]).transpose(1, 2)


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    run_inside(TARGET, batched_extend)
