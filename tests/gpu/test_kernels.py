"""The kernel of the loss of tokens, at real sizes; the tokens' factors."""

from dataclasses import replace

import pytest
import torch

from megatron_dapo.algorithms.dapo_loss import TokenBatch
from megatron_dapo.algorithms.policy_loss import OffPolicy
from tests import kernel_checks as checks
from tests.rollout_correction_oracle import CASES, check

pytestmark = pytest.mark.gpu

LOSSES = {
    "everything": checks.LOSS,
    "plain": replace(checks.LOSS, off_policy=None, rollout_is_threshold=None, use_kl_loss=False),
    "replayed_clip_higher": replace(checks.LOSS, off_policy=OffPolicy(mode="dapo_clip_higher", clip_high=1.0)),
    "icepop": replace(checks.LOSS, rollout_is_threshold_lower=0.5),
    "stale": replace(checks.LOSS, report_stale=True),
    "importance": replace(checks.LOSS, rollout_is_threshold=None),
    "bypass": replace(checks.LOSS, rollout_is_threshold=None, bypass_mode=True, report_stale=True),
    **{kind: replace(checks.MASKING, policy_loss=kind) for kind in ("cispo", "sapo", "dppo_tv", "dppo_kl")},
    **{kind: replace(checks.LOSS, kl_loss_type=kind) for kind in ("kl", "abs", "mse")},
}


@pytest.fixture(scope="module")
def tokens(device):
    """32768 rows: the number in a micro-batch."""
    return checks.HeadCase.make(device, rows=32768, hidden=64, vocab=512, chunk_size=4096)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_tokens_is_that_of_float64(tokens, loss):
    checks.check_token_loss(replace(tokens, tokens=tokens_for(loss, tokens.tokens)), LOSSES[loss])


def tokens_for(loss: str, tokens: TokenBatch) -> TokenBatch:
    """With the inputs of this loss only."""
    if loss == "importance":
        return replace(tokens, importance=tokens.weights - 0.5)  # in [0, 1)
    if loss == "bypass":
        tokens = replace(tokens, old_log_probs=tokens.rollout_log_probs)
    return replace(tokens, is_stale=~tokens.is_current & (tokens.exp_mask == 0))


@pytest.mark.parametrize("name", CASES)
def test_the_correction_of_a_batch_is_that_of_plain_arithmetic_and_the_same_each_time(device, name):
    case = CASES[name]()
    moved = {field: getattr(case, field).to(device) for field in ("old", "rollout", "mask", "segments")}
    first, second = (replace(case, **moved).corrected() for _ in range(2))
    check(first, case)
    assert torch.equal(first.importance, second.importance)
    for metric, pair in first.sums.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, second.sums[metric], strict=True)), metric
