"""The batched attention inside SGLang: found as plug-ins, put in place, equal to the original."""

import pytest
import torch

from tests.sglang_cpu_cases import decode_inputs, extend_inputs, in_server_process

pytestmark = pytest.mark.e2e

COMPARE = """
import sys, torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
from sglang.srt.plugins import load_plugins
names = ("_run_sdpa_forward_decode", "_run_sdpa_forward_extend")
kept = [getattr(Backend, name) for name in names]  # in a list: SGLang replaces what modules hold by name, too
load_plugins()
backend = object.__new__(Backend)
for name, original, inputs in zip(names, kept, torch.load(sys.argv[1])):
    assert getattr(Backend, name) is not original
    for window in (None, 4):
        inputs["sliding_window_size"] = window
        ours = getattr(Backend, name)(backend, **inputs).clone()
        torch.testing.assert_close(ours, original(backend, **inputs), rtol=1e-5, atol=1e-5)
print("equal")
"""


def test_sglang_replaces_its_attention_by_one_that_equals_it(tmp_path):
    decode = decode_inputs([1, 17, 3, 50, 2], 6, 2, 16, seed=1)
    extend = extend_inputs([(0, 6), (4, 2), (0, 6), (33, 5)], 6, 2, seed=1)
    torch.save((decode, extend), tmp_path / "inputs.pt")
    done = in_server_process(COMPARE, str(tmp_path / "inputs.pt"))
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]
