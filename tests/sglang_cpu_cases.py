"""Tools for tests of SGLang's CPU adaptation: inputs of a decode, and code run as in a server."""

import subprocess
import sys

import torch

from megatron_dapo.platform.sglang_cpu import cpu_server


def decode_inputs(lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int, seed: int) -> dict:
    """Requests with tokens in scattered cache slots; unowned slots hold nan."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = sum(lengths) + 50
    slots = torch.randperm(num_slots, generator=generator)
    caches = torch.full((2, num_slots, num_kv_heads, head_dim), float("nan"))
    # rows of other requests, and past the ends: unused slots
    req_to_token = slots[-50:].repeat(len(lengths) + 3, 1)
    pool_indices = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
    for row, length in zip(pool_indices.tolist(), lengths, strict=True):
        own, slots = slots[:length], slots[length:]
        req_to_token[row, :length] = own
        caches[:, own] = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
    query = torch.randn(len(lengths), num_heads, head_dim, generator=generator)
    return {
        "query": query,
        "output": torch.empty_like(query),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "req_to_token": req_to_token,
        "req_pool_indices": pool_indices,
        "seq_lens": torch.tensor(lengths),
        "scaling": 0.3,
        "enable_gqa": num_heads != num_kv_heads,
    }


def extend_inputs(lengths: list[tuple[int, int]], num_heads: int, num_kv_heads: int, seed: int) -> dict:
    """Requests of (cached, new) tokens, the rest as in `decode_inputs`."""
    inputs = decode_inputs([cached + new for cached, new in lengths], num_heads, num_kv_heads, 16, seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(sum(new for _, new in lengths), num_heads, 16, generator=generator)
    prefix_lens, new_lens = torch.tensor(lengths, dtype=torch.int32).unbind(1)
    more = dict(extend_prefix_lens=prefix_lens, extend_seq_lens=new_lens, causal=True)
    return inputs | more | {"query": query, "output": torch.empty_like(query)}


def in_server_process(code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *arguments]
    environment = cpu_server.server_environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
