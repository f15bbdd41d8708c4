"""Deterministic inference on the CPU: no row of a result depends on the batch.

Tokens are drawn by the hash of SGLang's GPU kernel.
"""

import random
import struct

import pytest
import torch

from tests.sglang_cpu_cases import in_server_process

pytestmark = pytest.mark.unit


def murmur3(content: bytes) -> int:
    """The oracle: MurmurHash3_x86_32 of whole words with seed 0, as its author published it."""
    mask, hashed = 0xFFFFFFFF, 0
    for (word,) in struct.iter_unpack("<I", content):
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        hashed ^= word * 0x1B873593 & mask
        hashed = (hashed << 13 | hashed >> 19) & mask
        hashed = hashed * 5 + 0xE6546B64 & mask
    hashed ^= len(content)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & mask
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & mask
    return hashed ^ hashed >> 16


CODE = """
import sys, torch
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
from tests.sglang_cpu_cases import decode_inputs
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
torch.set_num_threads(1)
backend = object.__new__(Backend)

def changed():
    generator = torch.Generator().manual_seed(1)
    found = set()
    for size, width in ((64, 192), (96, 40), (896, 300), (2048, 512)):
        weights, bias = torch.randn(width, size, generator=generator), torch.randn(width, generator=generator)
        rows = torch.randn(110, size, generator=generator)
        for name, product in {
            "mm": lambda some: some @ weights.T,
            "linear": lambda some: torch.nn.functional.linear(some, weights, bias),
        }.items():
            whole = product(rows)
            for n in (1, 2, 3, 4, 5, 9, 15, 33, 64, 97):
                if not torch.equal(product(rows[7:7 + n]), whole[7:7 + n]):
                    found.add(name)
    for heads, kv_heads, head_dim in ((4, 2, 16), (4, 4, 32), (2, 2, 8)):
        inputs = decode_inputs(list(range(1, 50)), heads, kv_heads, head_dim, seed=2)
        whole = backend._run_sdpa_forward_decode(**inputs).clone()
        for n in (1, 2, 5, 17, 40):
            some = {name: inputs[name][:n].clone() for name in ("query", "output", "req_pool_indices", "seq_lens")}
            if not torch.equal(backend._run_sdpa_forward_decode(**inputs | some), whole[:n]):
                found.add("decode")
    return sorted(found)

seeds, positions, columns = torch.load(sys.argv[1])
print(murmur_hash32(seeds.to(torch.uint64), positions, columns).tolist())
print(changed())
enable_batch_invariant_mode()
print(changed())
"""
DRAW = random.Random(3)
SEEDS = [0, 42, 2**32, 2**63 - 1, *(DRAW.randrange(2**63) for _ in range(20))]
POSITIONS = [DRAW.randrange(2**17) for _ in SEEDS]
COLUMNS = [0, 1, 2**17 - 1, 99]


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[str]:
    """What a server's process says: hashes, and what depends on the batch without and with the
    plug-in's operators. One process for all, since SGLang takes long to import."""
    inputs = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    torch.save(tuple(map(torch.tensor, (SEEDS, POSITIONS, COLUMNS))), inputs)
    done = in_server_process(CODE, str(inputs))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-3:]


def test_the_hash_that_draws_tokens_is_murmur3(said):
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in COLUMNS]
        for seed, position in zip(SEEDS, POSITIONS, strict=True)
    ]
    assert said[0] == str(expected)
    assert murmur3(b"test") == 0xBA6BD213  # a published value


def test_no_row_of_a_product_or_an_attention_depends_on_the_rest_of_the_batch(said):
    """Without the plug-in's operators some do: else there would be nothing to show."""
    _, before, after = said
    assert "mm" in before and after == "[]"
