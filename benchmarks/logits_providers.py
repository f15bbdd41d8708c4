"""From logits to log-prob and entropy: f(logits_TV, targets_T, with_entropy) -> (log_probs_T, entropy_T or None)."""

import torch

from benchmarks.provider import Provider, need, one_rank_group
from megatron_dapo.kernels.from_logits import logprob_entropy_from_logits


def ours(inplace_backward: bool):
    """(b). In place: the gradient overwrites the logits."""

    def function(logits_TV, targets_T, with_entropy):
        return logprob_entropy_from_logits(
            logits_TV, targets_T, want_entropy=with_entropy, inplace_backward=inplace_backward
        )

    return function


def log_softmax_entropy(logits_TV, targets_T, with_entropy):
    log_p = torch.log_softmax(logits_TV.float(), -1)
    log_probs = log_p.gather(1, targets_T[:, None])[:, 0]
    return log_probs, -(log_p.exp() * log_p).sum(-1) if with_entropy else None


def torch_cross_entropy(logits_TV, targets_T, with_entropy):
    return -torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="none"), None


def megatron(fused: bool):
    group = one_rank_group()
    if fused:
        module = need("megatron.core.fusions.fused_cross_entropy")
        nll = lambda logits, targets: module.fused_vocab_parallel_cross_entropy(logits, targets, group)  # noqa: E731
    else:
        nll = need("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    return lambda logits, targets, with_entropy: (-nll(logits[:, None], targets[:, None])[:, 0], None)


def liger():
    module = need("liger_kernel.transformers.functional")
    return lambda logits, targets, with_entropy: (
        -module.liger_cross_entropy(logits, targets, reduction="none"),
        None,
    )


def transformer_engine():
    module = need("transformer_engine.pytorch.cross_entropy")
    return lambda logits, targets, with_entropy: (
        -module.parallel_cross_entropy(logits[:, None], targets[:, None], 0.0, False, None)[:, 0],
        None,
    )


def flash_attention():
    module = need("flash_attn.ops.triton.cross_entropy")
    return lambda logits, targets, with_entropy: (-module.cross_entropy_loss(logits, targets)[0], None)


PROVIDERS = (
    Provider("ours (b)", lambda: ours(False), ours=True),
    Provider("ours (b) in place", lambda: ours(True), ours=True),
    Provider("naive", lambda: log_softmax_entropy, ours=True),
    Provider("torch.compile", lambda: torch.compile(log_softmax_entropy, dynamic=False), slow_start=True),
    Provider("F.cross_entropy", lambda: torch_cross_entropy, entropy=False, ours=True),
    Provider("megatron", lambda: megatron(fused=False), entropy=False),
    Provider("megatron fused", lambda: megatron(fused=True), entropy=False, slow_start=True),
    Provider("liger", liger, entropy=False, devices=("cuda",)),
    Provider("transformer engine", transformer_engine, entropy=False, devices=("cuda",)),
    Provider("flash-attn", flash_attention, entropy=False, devices=("cuda",)),
)
