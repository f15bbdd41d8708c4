"""Before a run: the fused head on a small random case, against float64 on the same machine."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.algorithms import Clip, LossConfig, TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.kernels.fused_head import Head, fused_dapo_head, head_log_probs
from megatron_dapo.kernels.row_plan import RowPlan

_ROWS, _HIDDEN, _COLUMNS, _PADDING, _CHUNK = 200, 128, 1000, 24, 64
_TEMPERATURE = 0.9
_LOSS = LossConfig(
    clip=Clip(0.2, 0.28, 3.0),
    use_kl_loss=True,
    kl_loss_coef=0.1,
    entropy_coef=0.01,
    report_entropy=True,
    report_mismatch=True,
)


class Error(NamedTuple):
    """name of what was compared; largest error: absolute for log-probs and entropy, else of the whole's norm; bound."""

    name: str
    error: float
    bound: float


def largest_error(device: torch.device, dtype: torch.dtype) -> list[Error]:
    """What the fused head says of a random case, against torch in float64 on the same, already rounded inputs.

    The inputs are of `dtype`, so products are exact but for their accumulation in float32: log-probs and entropies may
    differ by 2e-4 (bf16 kernels) or 2e-5; gradients pass through one rounding to `dtype`.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        values = std * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).to(device).requires_grad_()

    # logits of standard deviation 3: log-probs from 0 to about -20
    hidden, weight = normal(_ROWS, _HIDDEN), normal(_COLUMNS + _PADDING, _HIDDEN, std=3 * _HIDDEN**-0.5)
    counted = np.flatnonzero(torch.rand(_ROWS, generator=generator).numpy() < 0.7)
    targets = torch.randint(0, _COLUMNS, (len(counted),), generator=generator).to(device)
    oracle = _Oracle(hidden, weight, targets, torch.from_numpy(counted).to(device))
    tokens = _tokens(oracle.log_probs, generator)

    plan = RowPlan.make(counted, _ROWS, _CHUNK, device)
    head = Head(weight, None, _COLUMNS, _TEMPERATURE)
    log_probs, entropy = head_log_probs(hidden, targets, plan, head, want_entropy=True)
    answer = fused_dapo_head(hidden, targets, plan, tokens, _LOSS, head)
    answer.loss_sum.backward()
    loss, grad_hidden, grad_weight = oracle.loss(tokens)

    value_bound, gradient_bound = (2e-5, 1e-5) if dtype == torch.float32 else (2e-4, 4e-3)
    return [
        Error("log-probs", _largest(log_probs, oracle.log_probs), value_bound),
        Error("training log-probs", _largest(answer.log_probs, oracle.log_probs), value_bound),
        Error("entropy", _largest(entropy, oracle.entropy), value_bound),
        Error("mean loss", _largest(answer.loss_sum, loss) / len(counted), value_bound),
        Error("gradient of hidden", _relative(hidden.grad, grad_hidden), gradient_bound),
        Error("gradient of weight", _relative(weight.grad, grad_weight), gradient_bound),
        Error("log-probs above 0", max(0.0, log_probs.max().item()), 0.0),
    ]


class _Oracle:
    """log_softmax, its entropy, and autograd, in float64."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor) -> None:
        self._hidden, self._weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
        log_p = torch.log_softmax(self._hidden[rows] @ self._weight[:_COLUMNS].t() / _TEMPERATURE, dim=-1)
        self.log_probs = log_p.gather(1, targets[:, None])[:, 0]
        self.entropy = -(log_p.exp() * log_p).sum(-1)

    def loss(self, tokens: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        loss = dapo_loss(TokenOutputs(self.log_probs, self.entropy), tokens, _LOSS).loss_sum
        return loss, *torch.autograd.grad(loss, (self._hidden, self._weight))


def _tokens(log_probs: Tensor, generator: torch.Generator) -> TokenBatch:
    """Old, reference and rollout log-probs at distances that reach every branch of the loss."""

    def near(spread: float) -> Tensor:
        noise = torch.randn(len(log_probs), generator=generator).to(log_probs.device)
        return log_probs.detach().float() + spread * noise

    return TokenBatch(
        weights=torch.ones_like(log_probs, dtype=torch.float32),
        count=torch.tensor(len(log_probs), device=log_probs.device),
        advantages=torch.randn(len(log_probs), generator=generator).to(log_probs.device),
        old_log_probs=near(0.5),
        ref_log_probs=near(0.5),
        rollout_log_probs=near(0.01),
    )


def _largest(ours: Tensor, theirs: Tensor) -> float:
    return (ours.detach().double() - theirs.detach()).abs().max().item()


def _relative(ours: Tensor, theirs: Tensor) -> float:
    theirs = theirs.detach()
    return ((ours.detach().double() - theirs).norm() / theirs.norm()).item()
