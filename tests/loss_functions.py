"""Losses of the user's own for the tests: values of `actor.loss_function`."""

import torch


def dapo(sequences):
    """Return the built-in loss with token-mean, clip 0.2 and 0.28,
    dual clip 3: sum over tokens, tokens, metrics."""
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


def gspo(sequences):
    """Return GSPO (arXiv 2507.18071, eq. 5 and 7), clip 3e-4 and 4e-4,
    as a mean over responses: sum, responses."""
    loss, clipped = 0.0, 0.0
    for s in sequences:
        ratio = (((s.log_probs - s.old_log_probs) * s.mask).sum() / s.mask.sum()).exp()
        bounded = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        loss = loss - torch.minimum(ratio * s.advantages[0], bounded * s.advantages[0])
        clipped = clipped + s.mask.sum() * ((s.advantages[0] > 0) & (ratio > 1 + 4e-4))
    return loss, len(sequences), {"own/clipfrac": (clipped.detach(), sum(s.mask.sum() for s in sequences))}


def cispo(sequences):
    """Return CISPO (arXiv 2506.13585, section 3.1) with a weight of at most 1.02:
    sum over tokens, tokens."""
    loss, count, clipped = 0.0, 0.0, 0.0
    for s in sequences:
        ratio = (s.log_probs - s.old_log_probs).exp().detach()
        loss = loss - (s.mask * ratio.clamp(max=1.02) * s.advantages * s.log_probs).sum()
        count = count + s.mask.sum()
        clipped = clipped + (s.mask * (ratio > 1.02)).sum()
    return loss, count, {"own/clipfrac": (clipped, count)}


def sapo(sequences):
    """Return SAPO (arXiv 2511.20347) with temperatures 0.5 and 2: sum over tokens, tokens."""
    loss, count = 0.0, 0.0
    for s in sequences:
        ratio = (s.log_probs - s.old_log_probs).exp()
        tau = 0.5 + 1.5 * (s.advantages <= 0)
        loss = loss - (s.mask * 2 / tau * (1 + torch.tanh(tau / 2 * (ratio - 1))) * s.advantages).sum()
        count = count + s.mask.sum()
    return loss, count, {"own/clipfrac": (0.0, count)}


def dppo_tv(sequences):
    """Return DPPO (arXiv 2602.04879) with a total variation of at most 1e-4: sum over tokens, tokens."""
    loss, count, masked = 0.0, 0.0, 0.0
    for s in sequences:
        grown = s.log_probs.detach().exp() - s.old_log_probs.exp()
        is_masked = grown * s.advantages.sign() > 1e-4
        loss = loss - (s.mask * ~is_masked * (s.log_probs - s.old_log_probs).exp() * s.advantages).sum()
        count = count + s.mask.sum()
        masked = masked + (s.mask * is_masked * (s.advantages > 0)).sum()
    return loss, count, {"own/clipfrac": (masked, count)}


def nothing(sequences):
    """Return a loss with a metric under a name of the trainer's."""
    return sum(s.log_probs.sum() for s in sequences), 1, {"actor/loss": (0.0, 1.0)}


NO_FUNCTION = 1
