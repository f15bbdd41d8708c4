"""Built-in rewards, environments, policy losses and advantage estimators: names, paths, needs.

They are imported only for their use.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

BY_DATA_SOURCE = "by_data_source"
BUILT_IN_REWARDS = {
    "math_dapo": "megatron_dapo.rewards.text:math_dapo",
    "math_verify": "megatron_dapo.rewards.symbolic:math_verify",
    "exact_match": "megatron_dapo.rewards.text:exact_match",
    "reasoning_gym": "megatron_dapo.rewards.reasoning_gym_reward:reasoning_gym",
    "code_tests": "megatron_dapo.rewards.code.reward:code_tests",
    "environment": "megatron_dapo.rewards.text:environment",
    "none": "megatron_dapo.rewards.text:none",
}
BUILT_IN_ENVIRONMENTS = {
    "reasoning_gym": "megatron_dapo.envs.reasoning_gym:ReasoningGym",
}


@dataclass(frozen=True)
class Estimator:
    """The function of an advantage estimator, and its needs."""

    function: str
    """Import path of a function of one group (`GroupRewards`), or of a micro-batch's tokens
    (`TokenRewards`)."""
    per_token: bool = False
    """One advantage per token instead of one per response; whitened over the rollout step."""
    discounts: bool = False
    """It reads `algorithm.gamma`."""
    needs_critic: bool = False
    """It reads the critic's values and `algorithm.lam`."""
    needs_baseline: bool = False
    """It compares with the reward of one greedy response to the prompt."""
    needs_others: bool = False
    """It compares with the other responses of the group: two or more in all."""
    divides_by_std: bool = False
    """It reads `algorithm.norm_adv_by_std_in_grpo`."""
    divides_by_mean: bool = False
    """It divides by the mean of the group's rewards: none may be negative."""
    is_own: bool = False
    """The user's, by import path: it gets log-probs and extra_info too, and may answer per token."""


_OF_GROUPS, _OF_TOKENS = "megatron_dapo.algorithms.estimators", "megatron_dapo.algorithms.gae"
ESTIMATORS = {  # algorithm.adv_estimator
    "grpo": Estimator(f"{_OF_GROUPS}:grpo", divides_by_std=True),
    "rloo": Estimator(f"{_OF_GROUPS}:rloo", needs_others=True),
    "remax": Estimator(f"{_OF_GROUPS}:remax", needs_baseline=True),
    "maxrl": Estimator(f"{_OF_GROUPS}:maxrl", needs_others=True, divides_by_mean=True),
    "gae": Estimator(f"{_OF_TOKENS}:critic_advantages", per_token=True, discounts=True, needs_critic=True),
    "reinforce_plus_plus": Estimator(f"{_OF_TOKENS}:discounted_returns", per_token=True, discounts=True),
}


@dataclass(frozen=True)
class _PolicyLoss:
    """The needs of a policy loss; formulas: algorithms/policy_loss.py."""

    summary: str = ""
    """Its line in the process plan; DAPO's is that of its clip."""
    bounds: str = ""
    """Clip range of its paper, unless DAPO's."""
    clips_weight: bool = False
    """The clipped ratio weighs the log-prob: without a lower bound and a dual clip."""
    clips_ratio: bool = True
    """It reads the keys of the clip."""
    over_sequences: bool = False
    """One ratio per response: outside the fused head, and not for replayed tokens."""
    divergence: float = 0.0
    """Largest divergence in its authors' recipe, for a loss that masks tokens beyond one."""

    @property
    def clips_surrogate(self) -> bool:
        """Return whether the clip bounds the surrogate: from above and below, with a dual clip."""
        return self.clips_ratio and not self.clips_weight


POLICY_LOSSES = {  # actor_rollout_ref.actor.policy_loss
    "dapo": _PolicyLoss(),
    "cispo": _PolicyLoss(
        "cispo: the clipped ratio weighs the log-prob of each token",
        bounds="clip_ratio_low=1 clip_ratio_high=0.28",
        clips_weight=True,
    ),
    "gspo": _PolicyLoss(
        "gspo: one ratio per response; each logit is computed twice",
        bounds="clip_ratio_low=3e-4 clip_ratio_high=4e-4",
        over_sequences=True,
    ),
    "sapo": _PolicyLoss("sapo: a soft gate of each token's ratio in place of the clip", clips_ratio=False),
    "dppo_tv": _PolicyLoss(
        "dppo_tv: tokens beyond a total variation are masked, in place of the clip",
        clips_ratio=False,
        divergence=0.15,
    ),
    "dppo_kl": _PolicyLoss(
        "dppo_kl: tokens beyond a binary KL are masked, in place of the clip",
        clips_ratio=False,
        divergence=0.05,
    ),
}


def estimator_of(name: str) -> Estimator:
    """Return the row of a built-in name, or one of a function of the user's own."""
    return ESTIMATORS.get(name) or Estimator(name, is_own=True)


def estimators_with(**needs: bool) -> tuple[str, ...]:
    """Return the names of the estimators with these values."""
    return _names_with(ESTIMATORS, needs)


def policy_losses_with(**needs: bool) -> tuple[str, ...]:
    """Return the names of the policy losses with these values."""
    return _names_with(POLICY_LOSSES, needs)


def _names_with(table: Mapping[str, object], needs: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(
        name for name, row in table.items() if all(getattr(row, need) == value for need, value in needs.items())
    )


IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:function` or `package.module:Class`."""
