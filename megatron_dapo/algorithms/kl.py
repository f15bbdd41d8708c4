"""Estimators of KL(actor || reference) per token, and the controllers of its coefficient."""

from collections.abc import Callable

from torch import Tensor


def _k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    log_ratio = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    return (log_ratio.expm1() - log_ratio).clamp(-10.0, 10.0)


# http://joschu.net/blog/kl-approx.html; names as in verl
KL_PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda log_probs, ref_log_probs: log_probs - ref_log_probs,
    "abs": lambda log_probs, ref_log_probs: (log_probs - ref_log_probs).abs(),
    "mse": lambda log_probs, ref_log_probs: 0.5 * (log_probs - ref_log_probs).square(),
    "low_var_kl": _k3,
}


# Beside the estimators: sum_v p(v) (log p(v) - log q(v)) over the whole vocabulary, computed by the
# log-prob head.
FULL_KL = "full"


def kl_penalty(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL per token, for tokens drawn from the actor.

    kl: k1 = lp - ref. abs: |k1|. mse: k2 = k1^2 / 2. low_var_kl: k3 = exp(-k1) - 1 + k1, with k1
    clamped to +-20 and k3 to +-10. Shapes are equal; gradient flows through both arguments.

    As a loss, k1 has a gradient of expectation 0: it belongs into the reward, k2 and k3 into the
    loss.
    """
    return KL_PENALTIES[kind](log_probs, ref_log_probs)


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, num_samples: int) -> None:
        """Do nothing, because a constant coefficient does not depend on the KL."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """Steers the coefficient towards a target KL (arXiv 1909.08593, section 2.2)."""

    def __init__(self, kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, num_samples: int) -> None:
        """Adapt the coefficient after a step of num_samples responses, of mean KL current_kl."""
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_samples / self.horizon


KL_CONTROLLERS: dict[str, Callable[[float, float, int], FixedKLController]] = {
    "fixed": lambda kl_coef, target_kl, horizon: FixedKLController(kl_coef),
    "adaptive": AdaptiveKLController,
}
