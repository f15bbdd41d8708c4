"""Losses of the user's own for the tests: what `actor.loss_function` names."""

import torch


def dapo(sequences):
    """Return the built-in loss with token-mean, clip 0.2 and 0.28, dual clip 3: sum over tokens, tokens, metrics."""
    loss, count = 0.0, 0.0
    high, low = 0.0, 0.0
    for s in sequences:
        ratio = (s.log_probs - s.old_log_probs).clamp(-20, 20).exp()
        losses = torch.maximum(-s.advantages * ratio, -s.advantages * ratio.clamp(0.8, 1.28))
        is_bad = s.advantages < 0
        losses = torch.where(is_bad, torch.minimum(losses, -3.0 * s.advantages), losses)
        loss = loss + (s.mask * losses).sum()
        count = count + s.mask.sum()
        high = high + (s.mask * ((s.advantages > 0) & (ratio > 1.28))).sum()
        low = low + (s.mask * (is_bad & (ratio < 0.8))).sum()
    return loss, count, {"own/clipfrac": (high.detach(), count), "own/clipfrac_lower": (low.detach(), count)}


def dapo_with_kl(sequences):
    """Return the same with 0.1 * k3 of the KL to the reference."""
    loss, count, metrics = dapo(sequences)
    kl = 0.0
    for s in sequences:
        log_ratio = (s.ref_log_probs - s.log_probs).clamp(-20, 20)
        kl = kl + (s.mask * (log_ratio.expm1() - log_ratio).clamp(-10, 10)).sum()
    return loss + 0.1 * kl, count, {**metrics, "own/kl": (kl.detach(), count)}


def nothing(sequences):
    """Return a loss whose metric has a name of the trainer's."""
    return sum(s.log_probs.sum() for s in sequences), 1, {"actor/loss": (0.0, 1.0)}


NO_FUNCTION = 1
