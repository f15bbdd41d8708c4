"""Advantages of tokens: generalized advantage estimation over sequences and episodes.

It is one linear recurrence.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float,
    mask: Tensor | None = None,
    done: Tensor | None = None,
    last_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of arXiv 1506.02438 along the last axis, the axis of time.

    Every index of the other axes is a sequence of its own. In the formulas, "next" is the next
    counted step:

        delta_t = r_t + gamma * (1 - done_t) * V_next - V_t
        A_t = delta_t + gamma * lam * (1 - done_t) * A_next
        returns = A + V

    Args:
        rewards, values: [..., T], of one dtype, the results' too: pass float64 if digits matter.
        mask: [..., T], non-zero at counted steps; None for all. Other steps (an environment's
            tokens inside a trajectory, padding) are skipped, as if absent from the sequence. Their
            rewards, values and done are not read, NaN or not, and both results are 0 there. So a
            sequence's reward must lie on a counted step.
        done: [..., T], non-zero at the end of an episode, which sees nothing after it; None for no
            end.
        last_value: [...], V of the state after the last step of an unfinished episode; None for 0,
            the end.
    """
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask != 0
    rewards = torch.where(counted, rewards, 0)
    values = torch.where(counted, values, 0)
    goes_on = torch.ones_like(values) if done is None else (done == 0).to(values.dtype)
    last = values.new_zeros(values.shape[:-1]) if last_value is None else last_value.to(values.dtype)

    # value of the first counted step at or after t; then the same after t
    value_from = _backward_recurrence(values, torch.where(counted, 0.0, 1.0).to(values.dtype), last)
    next_values = torch.cat([value_from[..., 1:], last.unsqueeze(-1)], dim=-1)
    delta = torch.where(counted, rewards + gamma * goes_on * next_values - values, 0)
    decay = torch.where(counted, gamma * lam * goes_on, 1)
    advantages = torch.where(counted, _backward_recurrence(delta, decay, torch.zeros_like(last)), 0)
    return advantages, advantages + values


class TokenRewards(NamedTuple):
    """The tokens of a micro-batch, as their estimator's input. Tensors are [..., T].

    A row may hold several responses, one after another.
    """

    rewards: Tensor
    """Float64: the shaped reward at the response's last counted token, minus a KL penalty."""
    counted: Tensor
    """True at the model's own tokens with a loss."""
    is_end: Tensor
    """True at the last counted token of each response."""
    values: Tensor | None
    """Of the critic, if there is one."""
    gamma: float
    lam: float


def critic_advantages(tokens: TokenRewards) -> tuple[Tensor, Tensor]:
    """Return (advantages before whitening, returns) by GAE (arXiv 1506.02438)."""
    assert tokens.values is not None, "a critic has scored these tokens"
    return gae(
        tokens.rewards,
        tokens.values,
        gamma=tokens.gamma,
        lam=tokens.lam,
        mask=tokens.counted,
        done=tokens.is_end,
    )


def discounted_returns(tokens: TokenRewards) -> tuple[Tensor, Tensor]:
    """Return (advantages before whitening, returns) by REINFORCE++ (arXiv 2501.03262).

    It is GAE without a critic, lam 1.
    """
    values = torch.zeros_like(tokens.rewards)
    return gae(tokens.rewards, values, gamma=tokens.gamma, lam=1.0, mask=tokens.counted, done=tokens.is_end)


def last_counted(counted: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Return a bool tensor, true at the last counted token of each segment, if it has any.

    counted (bool), segment_ids (in [0, num_segments)): of one shape, segments whole and in order
    within it.
    """
    flat = counted.reshape(-1)
    places = torch.arange(counted.numel(), device=counted.device)
    last = torch.full((num_segments,), -1, device=counted.device)
    last.scatter_reduce_(0, segment_ids.reshape(-1), torch.where(flat, places, -1), "amax")
    return (flat & (places == last[segment_ids.reshape(-1)])).view_as(counted)


def _backward_recurrence(terms: Tensor, factors: Tensor, last: Tensor) -> Tensor:
    """Return x_t = terms_t + factors_t * x_(t+1) for all t of [..., T], with x_T = last [...].

    factors: in [0, 1]. By doubling: after k rounds a step has seen the 2^k steps from itself on, so
    that log2(T) vector operations do.
    """
    num_steps = terms.size(-1)
    x = torch.cat([terms, last.unsqueeze(-1)], dim=-1)
    factors = torch.cat([factors, torch.zeros_like(last).unsqueeze(-1)], dim=-1)
    stride = 1
    while stride <= num_steps:
        x = torch.cat([x[..., :-stride] + factors[..., :-stride] * x[..., stride:], x[..., -stride:]], dim=-1)
        factors = torch.cat(
            [factors[..., :-stride] * factors[..., stride:], torch.zeros_like(factors[..., -stride:])], dim=-1
        )
        stride *= 2
    return x[..., :num_steps]
