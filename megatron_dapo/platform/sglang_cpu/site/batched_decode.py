"""SGLang plug-in: decode attention of the torch_native backend in three products, not request by
request in Python."""

import torch

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"


length_multiple = 1
"""Of the length that a batch is filled up to. `batch_invariant` sets another: the order of sums
depends on a length."""


class _CacheRows:
    """Positions of a batch's keys and values in the caches, computed by the first layer of a kind
    for the others."""

    def __init__(self):
        self._seq_lens = None
        self._found = {}

    def __call__(self, req_to_token, req_pool_indices, seq_lens, *kind):
        """Return (rows of caches [num_slots * Hkv, D], [B * Hkv * L]; the mask to add to scores, [B
        * Hkv, 1, L])."""
        # seq_lens is a new tensor in each step and the same one in all layers of a step; held, no
        # other has its place
        if self._seq_lens is not seq_lens:
            self._seq_lens, self._found = seq_lens, {}
        if kind not in self._found:
            self._found[kind] = cache_rows(req_to_token, req_pool_indices, seq_lens, *kind)
        return self._found[kind]


def cache_rows(req_to_token, req_pool_indices, seq_lens, num_kv_heads, window):
    """Return the same of layers with so many key and value heads that see `window` tokens before a
    request's last, or all (None). Scores past a request's end become -inf."""
    first_B = torch.zeros_like(seq_lens) if window is None else (seq_lens - 1 - window).clamp(min=0)
    num_B = seq_lens - first_B
    length = -(-int(num_B.max()) // length_multiple) * length_multiple
    places_BL = first_B[:, None] + torch.arange(length, device=seq_lens.device)
    exists_BL = places_BL < seq_lens[:, None]
    # Slots past a request's end belong to others, with possibly NaN values, and 0 * nan is nan: the
    # request's first slot is read in their place.
    slots_BL = req_to_token[req_pool_indices[:, None], torch.where(exists_BL, places_BL, first_B[:, None])].long()
    heads = torch.arange(num_kv_heads, device=slots_BL.device)
    rows_BHL = slots_BL[:, None, :] * num_kv_heads + heads[:, None]
    bias_BL = torch.zeros(exists_BL.shape, device=slots_BL.device).masked_fill_(~exists_BL, float("-inf"))
    return rows_BHL.flatten(), bias_BL.repeat_interleave(num_kv_heads, dim=0)[:, None]


_rows_of_batch = _CacheRows()


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
    """Attend one query token per request to its cached keys and values; unsupported cases go to
    `original`.

    query [B, Hq, D], output [B, Hq, Dv], caches [num_slots, Hkv, D | Dv], req_to_token
    [num_requests, max_context], req_pool_indices, seq_lens [B]. Each sees the last 1 +
    sliding_window_size tokens, or all. `attention_sinks` may have left sinks, [Hq], with the
    backend. Writes and returns output.
    """
    if encoder_lens is not None or scaling is None:
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
    num_rows = query.shape[0] * num_kv_heads
    rows, bias = _rows_of_batch(req_to_token, req_pool_indices, seq_lens, num_kv_heads, sliding_window_size)
    # index_select of rows takes a sixth of the time of cache[slots]
    keys = k_cache.flatten(0, 1).index_select(0, rows).view(num_rows, -1, k_cache.shape[2]).float()
    values = v_cache.flatten(0, 1).index_select(0, rows).view(num_rows, -1, v_cache.shape[2]).float()
    # the query heads of one KV head stand as its query positions
    grouped = query.reshape(num_rows, -1, query.shape[2]).float()
    scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=scaling)
    if (sinks := vars(backend).pop("sinks", None)) is None:
        shares = scores.softmax(-1)
    else:
        sinks = sinks.to(scores.dtype).view(num_kv_heads, -1, 1).repeat(query.shape[0], 1, 1)
        shares = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    output.copy_(torch.bmm(shares, values).view_as(output))
    return output


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    run_inside(TARGET, batched_decode)
