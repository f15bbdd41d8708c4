"""Single kernels at real sizes: the loss of tokens, rows of logits, and the product that keeps only its statistics."""

from dataclasses import replace

import pytest
import torch

from megatron_dapo.algorithms.policy_loss import OffPolicy
from tests import kernel_checks as checks

pytestmark = pytest.mark.gpu

LOSSES = {
    "everything": checks.LOSS,
    "plain": replace(checks.LOSS, off_policy=None, tis_cap=None, use_kl_loss=False),
    "replayed_clip_higher": replace(checks.LOSS, off_policy=OffPolicy(mode="dapo_clip_higher", clip_high=1.0)),
    **{kind: replace(checks.LOSS, kl_loss_type=kind) for kind in ("kl", "abs", "mse")},
}


@pytest.fixture(scope="module")
def tokens(device):
    """32768 rows: as many as a micro-batch has."""
    return checks.HeadCase.make(device, rows=32768, hidden=64, vocab=512, chunk_size=4096)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_tokens_is_that_of_float64(tokens, loss):
    checks.check_token_loss(tokens, LOSSES[loss])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [19008, 152064])
def test_log_probs_and_gradients_from_logits_are_those_of_float64(device, vocab, dtype):
    checks.check_from_logits(
        checks.HeadCase.make(device, rows=1024, hidden=256, vocab=vocab, padding=24, chunk_size=1024, dtype=dtype)
    )


@pytest.mark.parametrize("hidden, vocab", [(896, 151936), (3584, 152064), (5120, 19008), (1032, 19003)])
def test_statistics_without_logits_are_those_of_float64(device, hidden, vocab):
    checks.check_linear_statistics(checks.HeadCase.make(device, rows=3000, hidden=hidden, vocab=vocab, chunk_size=3000))
