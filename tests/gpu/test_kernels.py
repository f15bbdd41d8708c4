"""The kernel of the loss of tokens, at real sizes."""

from dataclasses import replace

import pytest

from megatron_dapo.algorithms.policy_loss import OffPolicy
from tests import kernel_checks as checks

pytestmark = pytest.mark.gpu

LOSSES = {
    "everything": checks.LOSS,
    "plain": replace(checks.LOSS, off_policy=None, rollout_is_threshold=None, use_kl_loss=False),
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
