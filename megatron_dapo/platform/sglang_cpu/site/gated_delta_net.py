"""SGLang plug-in: gated delta net (Qwen3-Next, Qwen3.5, 3.6) in torch.

SGLang computes it on a CPU by C++ operators of sgl_kernel, and norms and a gate beside it by Triton
kernels unless the CPU has AMX. Here are the same in torch, in float32, under the operators' names
and with the arguments in use; another name or another value of a setting raises.

A request has a slot of two states: the last inputs of the convolution, [D, W - 1], and the
recurrent state, [Hv, V, K]. A row's bits do not depend on the other requests.
"""

import torch
from gpu_only import names_of
from torch.nn.utils.rnn import pad_sequence

TARGET = "sglang.kernels.ops.attention.fla"
SHARED_EXPERT = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"

IN_USE = {
    "activation": "silu",
    "head_first": False,
    "use_qk_l2norm_in_kernel": True,
    "softplus_beta": 1.0,
    "softplus_threshold": 20.0,
}
"""Settings of the operators below, with their only value here."""


def _check(**settings):
    """Refuse other values of settings."""
    other = {name: value for name, value in settings.items() if value != IN_USE[name]}
    if other:
        raise NotImplementedError(f"SGLang's gated delta net on a CPU is asked for {other}, but has {IN_USE} alone")


def causal_conv1d_fn_cpu(
    x, weight, bias, activation, conv_states, has_initial_state, cache_indices, query_start_loc, seq_lens_cpu=None
):
    """Return the convolution of prompts, one after the other in x [D, T], and write their last
    inputs to the slots. weight: [D, W]."""
    _check(activation=activation)
    out = torch.empty_like(x)
    ends = query_start_loc.tolist()
    requests = zip(cache_indices.tolist(), has_initial_state.tolist(), ends[:-1], ends[1:], strict=True)
    for slot, has_begun, start, end in requests:
        before = conv_states[slot] if has_begun else torch.zeros_like(conv_states[slot])
        out[:, start:end], conv_states[slot] = _convolve(x[:, start:end], before, weight, bias)
    return out


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, conv_state_indices):
    """Return the convolution of one more token of each request, x [N, D], and update the slots."""
    _check(activation=activation)
    slots = conv_state_indices.long()
    out, conv_states[slots] = _convolve(x[..., None], conv_states[slots], weight, bias)
    return out[..., 0]


def _convolve(x, before, weight, bias):
    """Return (silu of the convolution, the last inputs) of x [..., D, L] behind [..., D, W - 1]."""
    inputs = torch.cat((before.to(x.dtype), x), dim=-1)
    out = (inputs.unfold(-1, weight.shape[-1], 1).float() * weight[:, None].float()).sum(-1)
    if bias is not None:
        out = out + bias[:, None].float()
    return (out * _sigmoid(out)).to(x.dtype), inputs[..., x.shape[-1] :].to(before.dtype)


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """Return decay's logarithm and beta, [1, T, Hv], of a, b [T, Hv]."""
    a = a.float() + dt_bias.float()
    softplus = torch.where(a > 20, a, a.exp().log1p())
    return (-A_log.float().exp() * softplus)[None], _sigmoid(b)[None]


def _sigmoid(x):
    """torch's own, and its softplus, round differently at the end of a tensor."""
    return 1 / (1 + (-x.float()).exp())


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, initial_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel, initial_state_indices
):
    """Return ([1, T, Hv, V], None, None) of requests, one after the other, and update the slots.

    q, k: [1, T, Hk, K]. v: [1, T, Hv, V]. g, beta: [1, T, Hv]. initial_state: all slots.
    """
    _check(head_first=head_first, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    slots, lengths = initial_state_indices.long(), cu_seqlens.diff().tolist()
    # beyond a request's end beta and the decay's logarithm are 0: its state stays
    padded = [pad_sequence(x[0].float().split(lengths), batch_first=True) for x in (q, k, v, g, beta)]
    out, states = _recur(*padded, initial_state[slots].float())
    initial_state[slots] = states.to(initial_state.dtype)
    rows = torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])
    return rows[None].to(v.dtype), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel,
    softplus_beta, softplus_threshold,
):  # fmt: skip
    """Return [1, T, Hv, V] as `chunk_gated_delta_rule_cpu` does, from a and b [T, Hv]."""
    _check(softplus_beta=softplus_beta, softplus_threshold=softplus_threshold)
    gates = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q, k, v, *gates, initial_state_source, cu_seqlens, False, use_qk_l2norm_in_kernel, initial_state_indices
    )[0]


def _recur(q, k, v, g, beta, states):
    """Return ([N, L, Hv, V], new states), token by token. q, k: [N, L, Hk, K]. v: [N, L, Hv, V].
    g, beta: [N, L, Hv]. states: [N, Hv, V, K]. Each key head serves neighbouring value heads."""
    num_served = v.shape[2] // q.shape[2]
    q, k = (_normalized(x).repeat_interleave(num_served, dim=2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    outputs = []
    for token in range(q.shape[1]):
        key, query = k[:, token, :, None], q[:, token, :, None]
        states = states * g[:, token, :, None, None].exp()
        update = (v[:, token] - (states * key).sum(-1)) * beta[:, token, :, None]
        states = states + update[..., None] * key
        outputs.append((states * query).sum(-1))
    return torch.stack(outputs, dim=1), states


def _normalized(x):
    """Return vectors of length 1, with the kernels' epsilon inside the root."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, num_key_heads, num_value_heads, key_dim, value_dim):
    """Return (q, k and v [T, D], z [T, Hv, V], b, a [T, Hv]) of the products' columns."""
    num_qkv = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    z = qkvz[:, num_qkv:].reshape(-1, num_value_heads, value_dim)
    b, a = ba.chunk(2, dim=-1)
    return qkvz[:, :num_qkv].contiguous(), z, b.contiguous(), a.contiguous()


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """Return (normed queries, normed keys, gates), [T, heads * head_dim], of heads [query, gate]."""
    q, gate = q_gate.unflatten(-1, (num_heads, 2, head_dim)).unbind(2)
    k = k.unflatten(-1, (-1, head_dim))
    return _norm(q, 1 + q_weight, eps).flatten(1), _norm(k, 1 + k_weight, eps).flatten(1), gate.flatten(1)


def _norm(x, weight, eps, gate=1.0):
    """Return the RMS norm of x, times weight and gate, rounded once."""
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() * gate).to(x.dtype)


def fused_sigmoid_mul_cpu(x, gate):
    """Multiply x by its gates, in place."""
    x.copy_(x.float() * _sigmoid(gate))


def gated_norm(original, norm, x, gate):
    """Return norm(x) * silu(gate); SGLang's is a Triton kernel."""
    return _norm(x, norm.weight, norm.eps, gate.float() * _sigmoid(gate))


def add_shared_expert(original, hidden_states, gate_weight, shared_output, final_hidden_states):
    """Add sigmoid(gate) * the shared expert's output to the others'; SGLang's is a Triton
    kernel."""
    gate = _sigmoid((hidden_states.float() * gate_weight.float()).sum(-1))
    final_hidden_states.copy_(final_hidden_states.float() + gate[:, None] * shared_output.float())


OPERATORS = (
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
)
NEVER_CALLED = "fused_qk_gemma_rmsnorm_cpu"
"""An operator that SGLang asks for, and needs for attention without gates only."""


def register():
    """Called by SGLang once, before it imports models and forks its processes."""
    from replacing import run_inside

    run_inside(f"{TARGET}.layernorm_gated.RMSNorm.forward", gated_norm)
    run_inside(f"{TARGET}.fused_norm_gate.FusedRMSNormGated.forward", gated_norm)
    run_inside(SHARED_EXPERT, add_shared_expert)
    for operator in OPERATORS:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)
    setattr(torch.ops.sgl_kernel, NEVER_CALLED, names_of("sgl_kernel")(NEVER_CALLED))
