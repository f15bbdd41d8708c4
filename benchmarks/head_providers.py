"""Heads: from hidden states and a weight to log-probs, entropies and the same loss (head_case)."""

import numpy as np
import torch

from benchmarks.head_case import TOKENS_PER_SEQUENCE, HeadAnswer, HeadCase, loss_of
from benchmarks.provider import Provider, need, one_rank_group
from megatron_dapo.kernels.fused_head import Head, fused_dapo_head, head_log_probs
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan

CPU_CHUNK, GPU_CHUNK = 1024, 4096


def plan_of(case: HeadCase) -> RowPlan:
    rows = np.arange(case.hidden_TH.size(0))
    chunk_size = GPU_CHUNK if case.device.type == "cuda" else CPU_CHUNK
    return RowPlan.make(rows, len(rows), chunk_size, case.device)


def fused():
    """Return the fused head: loss and gradient in the forward pass, logits computed once."""

    def head(case: HeadCase) -> HeadAnswer:
        answer = fused_dapo_head(
            case.hidden_TH, case.targets_T, plan_of(case), case.tokens, case.loss, Head(case.weight_VH)
        )
        return HeadAnswer(answer.loss_sum, answer.log_probs, answer.entropy)

    return head


def composable():
    """Return the composable head: log-prob and entropy with autograd.

    Logits are computed again in the backward pass.
    """

    def head(case: HeadCase) -> HeadAnswer:
        log_probs, entropy = linear_logprob_entropy(
            case.hidden_TH,
            case.weight_VH,
            case.targets_T,
            want_entropy=case.with_entropy,
            chunk_size=plan_of(case).chunk_size,
        )
        return loss_of(case, log_probs, entropy)

    return head


def forward_only():
    """Return the forward-only head: the cost of old and reference log-probs, chunk by chunk."""

    def head(case: HeadCase) -> HeadAnswer:
        hidden, plan = case.hidden_TH.detach(), plan_of(case)
        answer = head_log_probs(hidden, case.targets_T, plan, Head(case.weight_VH), want_entropy=case.with_entropy)
        return HeadAnswer(None, *answer)

    return head


def log_softmax_entropy(hidden_TH, weight_VH, targets_T, with_entropy):
    """Return log-probs and entropy in the usual way, without a thought of memory."""
    log_p = torch.log_softmax((hidden_TH @ weight_VH.t()).float(), -1)
    log_probs = log_p.gather(1, targets_T[:, None])[:, 0]
    return log_probs, -(log_p.exp() * log_p).sum(-1) if with_entropy else None


def naive(function=log_softmax_entropy):
    def head(case: HeadCase) -> HeadAnswer:
        return loss_of(case, *function(case.hidden_TH, case.weight_VH, case.targets_T, case.with_entropy))

    return head


def compiled():
    return naive(torch.compile(log_softmax_entropy, dynamic=False))


def liger_grpo():
    """Return Liger's chunked linear GRPO loss.

    Its own loss is DAPO's mean; it takes one sequence per chunk, and has no entropy.
    """
    module = need("liger_kernel.chunked_loss")

    def head(case: HeadCase) -> HeadAnswer:
        clip, tokens = case.loss.clip, case.tokens
        loss = module.LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, epsilon_low=clip.low, epsilon_high=clip.high, loss_type="dapo"
        )
        targets = case.targets_T.view(-1, TOKENS_PER_SEQUENCE)
        mean, *_ = loss(
            case.hidden_TH.view(*targets.shape, -1),
            case.weight_VH,
            targets,
            torch.ones_like(targets),
            tokens.advantages.view(targets.shape)[:, 0],
            old_per_token_logps=tokens.old_log_probs.view(targets.shape),
        )
        return HeadAnswer(mean * tokens.count, None)

    return head


def liger_cross_entropy():
    module = need("liger_kernel.transformers.functional")

    def head(case: HeadCase) -> HeadAnswer:
        nll = module.liger_fused_linear_cross_entropy(case.hidden_TH, case.weight_VH, case.targets_T, reduction="none")
        return loss_of(case, -nll, None)

    return head


def cut_cross_entropy():
    module = need("cut_cross_entropy")

    def head(case: HeadCase) -> HeadAnswer:
        # without its gradient filter, which leaves out small values
        implementation = "cce_exact" if case.device.type == "cuda" else "torch_compile"
        nll = module.linear_cross_entropy(
            case.hidden_TH, case.weight_VH, case.targets_T, reduction="none", impl=implementation
        )
        return loss_of(case, -nll, None)

    return head


def megatron(fused: bool):
    """Return Megatron-core's cross entropy over the logits of its output layer."""
    group = one_rank_group()
    if fused:
        module = need("megatron.core.fusions.fused_cross_entropy")
    else:
        module = need("megatron.core.tensor_parallel.cross_entropy")

    def head(case: HeadCase) -> HeadAnswer:
        logits = (case.hidden_TH @ case.weight_VH.t())[:, None]
        targets = case.targets_T[:, None]
        if fused:
            nll = module.fused_vocab_parallel_cross_entropy(logits, targets, group)
        else:
            nll = module.vocab_parallel_cross_entropy(logits, targets)
        return loss_of(case, -nll[:, 0], None)

    return head


def verl_triton():
    module = need("verl.utils.kernel.linear_cross_entropy")

    def head(case: HeadCase) -> HeadAnswer:
        return loss_of(case, *module.linear_cross_entropy(case.hidden_TH, case.weight_VH, case.targets_T, 1.0, "none"))

    return head


def verl_chunked():
    module = need("verl.utils.experimental.torch_functional")

    def head(case: HeadCase) -> HeadAnswer:
        return loss_of(case, *module.FusedLinearForPPO()(case.hidden_TH, case.weight_VH, case.targets_T))

    return head


PROVIDERS = (
    Provider("ours fused", fused, ours=True),
    Provider("ours composable", composable, ours=True),
    Provider("ours forward-only", forward_only, backward=False, ours=True),
    Provider("naive", naive, ours=True),
    Provider("torch.compile", compiled, slow_start=True),
    Provider("megatron", lambda: megatron(fused=False), entropy=False),
    Provider("megatron fused", lambda: megatron(fused=True), entropy=False, slow_start=True),
    Provider("liger grpo", liger_grpo, entropy=False, slow_start=True),
    Provider("liger ce", liger_cross_entropy, entropy=False, devices=("cuda",)),
    Provider("cce", cut_cross_entropy, entropy=False, slow_start=True),
    Provider("verl triton", verl_triton, devices=("cuda",)),
    Provider("verl chunked", verl_chunked),
)
