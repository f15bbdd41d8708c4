"""The GPU tests' demands on the Triton kernels, in the interpreter,
at the smallest telling sizes."""

import pytest
import torch

from tests import kernel_checks as checks

pytestmark = pytest.mark.unit

# products of halves with float32 results are a GPU's: here the kernels get float32 logits
SMALL = dict(rows=16, hidden=16, vocab=150, padding=6, chunk_size=8, dtype=torch.float32)
CHECKS = (
    checks.check_values,
    checks.check_composed_gradients,
    checks.check_fused_head,
    checks.check_fused_is_composed,
)


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_keep_their_promises(check):
    check(checks.HeadCase.make(torch.device("cpu"), **SMALL), use_triton=True)
