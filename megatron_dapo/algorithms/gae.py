"""Advantages of tokens: generalized advantage estimation over sequences and episodes, as one linear recurrence."""

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
    """Return (advantages, returns) of arXiv 1506.02438, time along the last axis, every other axis a sequence of its
    own.

    delta_t = r_t + gamma * (1 - done_t) * V_next - V_t,  A_t = delta_t + gamma * lam * (1 - done_t) * A_next,
    returns = A + V,  where "next" is the next step that counts.

    rewards, values: [..., T], of one dtype, which is the results' too: pass float64 where digits matter.
    mask [..., T], non-zero where a step counts (None = everywhere): others (an environment's tokens inside a
    trajectory, padding) are skipped, as if the sequence did not have them. Their rewards, values and done are not read,
    NaN or not, and both results are 0 there. A sequence's reward must therefore lie on a step that counts.
    done [..., T], non-zero where step t ended an episode (None = nowhere): nothing after it is seen.
    last_value [...]: V of the state after the last step, where its episode goes on (None = 0: the end).
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
    """The tokens of a micro-batch, as their estimator sees them. Tensors are [..., T].

    A row may hold several responses, one after another.
    """

    rewards: Tensor
    """Float64: the shaped reward at the response's last counted token, minus a KL penalty in the reward."""
    counted: Tensor
    """True where the model wrote the token and it has a loss."""
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
    """Return (advantages before whitening, returns) by REINFORCE++ (arXiv 2501.03262): GAE without a critic, lam 1."""
    values = torch.zeros_like(tokens.rewards)
    return gae(tokens.rewards, values, gamma=tokens.gamma, lam=1.0, mask=tokens.counted, done=tokens.is_end)


def last_counted(counted: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Return a bool tensor, true at the last counted token of each segment; a segment without any has none.

    counted (bool), segment_ids (in [0, num_segments)): of one shape, segments whole and in order within it.
    """
    flat = counted.reshape(-1)
    places = torch.arange(counted.numel(), device=counted.device)
    last = torch.full((num_segments,), -1, device=counted.device)
    last.scatter_reduce_(0, segment_ids.reshape(-1), torch.where(flat, places, -1), "amax")
    return (flat & (places == last[segment_ids.reshape(-1)])).view_as(counted)


def _backward_recurrence(terms: Tensor, factors: Tensor, last: Tensor) -> Tensor:
    """Return x_t = terms_t + factors_t * x_(t+1) for all t of [..., T], with x_T = last [...]; factors in [0, 1].

    By doubling: after k rounds a step has seen the 2^k steps from itself on, so that log2(T) vector operations do.
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
