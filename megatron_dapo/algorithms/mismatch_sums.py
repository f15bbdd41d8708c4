"""The distance of the server's log-probs from the trainer's for the same tokens."""

from torch import Tensor

from megatron_dapo.algorithms.metrics import Maxima, Sums, masked_max, token_mean

MEAN_MISMATCH = "actor/rollout_abs_diff"
MEAN_MISMATCH_ALL = "actor/rollout_abs_diff_all"  # of older weights' tokens as well


def mismatch_sums(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor, stale: Tensor | None = None
) -> tuple[Sums, Maxima]:
    """Return metric sums of d = trainer - rollout over the counted tokens, drawn by the server.

    rollout_kl: k1 = -d. rollout_k3: exp(d) - 1 - d. Both estimate KL(server || trainer).
    rollout_abs_diff: |d|, and its largest. rollout_ess (made by `finalize`): mean(w)^2 / mean(w^2)
    of w = exp(d), the effective share of tokens.

    stale: tokens written by older weights, none of them counted. Their kl, k3 and ess have names
    with the ending _stale; rollout_ess_all is of both together. In exp, d is clamped to +-20. All
    shapes equal; no gradient.
    """
    # k3 of 1e-5 loses its digits in float32
    diff = (trainer_log_probs - rollout_log_probs).detach().double()
    clamped = diff.clamp(-20.0, 20.0)
    weight = clamped.exp()
    sums = {
        "actor/rollout_kl": token_mean(-diff, counted),
        "actor/rollout_k3": token_mean(clamped.expm1() - clamped, counted),
        MEAN_MISMATCH: token_mean(diff.abs(), counted),
        "_rollout_weight": token_mean(weight, counted),
        "_rollout_weight_squared": token_mean(weight.square(), counted),
    }
    if stale is not None:
        both = counted | stale
        sums |= {
            "actor/rollout_kl_stale": token_mean(-diff, stale),
            "actor/rollout_k3_stale": token_mean(clamped.expm1() - clamped, stale),
            "_rollout_weight_stale": token_mean(weight, stale),
            "_rollout_weight_squared_stale": token_mean(weight.square(), stale),
            "_rollout_weight_all": token_mean(weight, both),
            "_rollout_weight_squared_all": token_mean(weight.square(), both),
        }
    return sums, {"actor/rollout_abs_diff_max": masked_max(diff.abs(), counted)}
