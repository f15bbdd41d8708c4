"""Before a run: the fused head on a small random case, against float64 on the same machine."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.metrics import stack_maxima, stack_sums
from megatron_dapo.algorithms.policy_loss import LossSums
from megatron_dapo.kernels.fused_head import Head, KLReference, fused_dapo_head, head_full_kl, head_log_probs
from megatron_dapo.kernels.row_plan import RowPlan

_ROWS, _HIDDEN, _PADDING, _CHUNK = 96, 128, 24, 32
_TEMPERATURE = 0.9


@dataclass(frozen=True)
class Check:
    """The kernels' use in a run."""

    dtype: torch.dtype
    num_columns: int
    """This rank's share of the vocabulary; it decides block sizes."""
    loss: LossConfig
    """Decides, with has_old_log_probs and has_importance, the compiled variants of the loss
    kernel."""
    has_old_log_probs: bool
    full_kl: bool = False
    """Whether the loss or the reward has a KL over the whole vocabulary."""
    has_importance: bool = False


class Error(NamedTuple):
    """The largest error of a compared value."""

    name: str
    error: float
    """Absolute for log-probs and entropy, else relative to the norm."""
    bound: float


def largest_errors(check: Check, device: torch.device) -> list[Error]:
    """Compare the fused head with torch in float64 on the same, already rounded random inputs.

    The inputs have the check's dtype, so products are exact except for their accumulation in
    float32. Log-probs and entropies may differ by 2e-4 (bf16 kernels) or 2e-5. Gradients pass
    through one rounding to the dtype. Of a metric only the count is compared. That finds metrics
    that a kernel fails to store. The sum is no measure: the share of clipped tokens jumps if a
    ratio is near the bound.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        values = std * torch.randn(*shape, generator=generator)
        return values.to(check.dtype).to(device).requires_grad_()

    # logits of standard deviation 3: log-probs from 0 to about -20
    columns = check.num_columns
    hidden = normal(_ROWS, _HIDDEN)
    weight = normal(columns + _PADDING, _HIDDEN, std=3 * _HIDDEN**-0.5)
    counted = np.flatnonzero(torch.rand(_ROWS, generator=generator).numpy() < 0.8)
    targets = torch.randint(0, columns, (len(counted),), generator=generator).to(device)
    rows = torch.from_numpy(counted).to(device)
    reference = None
    if check.full_kl:  # another model, not far from this one
        near = (x.detach() + normal(*x.shape, std=std).detach() for x, std in ((hidden, 0.2), (weight, 0.05)))
        reference = KLReference(*near)
        reference = replace(reference, hidden_KH=reference.hidden_KH[rows])
    oracle = _Oracle(hidden, weight, targets, rows, columns, reference)
    tokens = _tokens(check, oracle.log_probs, generator)

    plan = RowPlan.make(counted, _ROWS, _CHUNK, device)
    head = Head(weight, None, columns, _TEMPERATURE)
    log_probs, entropy = head_log_probs(hidden, targets, plan, head, want_entropy=True)
    answer = fused_dapo_head(hidden, targets, plan, tokens, check.loss, head, reference=reference)
    answer.loss_sum.backward()
    exact, grad_hidden, grad_weight = oracle.loss(tokens, check.loss)
    sum_names, max_names = metric_names(check.loss)
    counts = stack_sums(exact.sums, sum_names, device)[:, 1]
    maxima = stack_maxima(exact.maxima, max_names, device)

    kl = None if reference is None else head_full_kl(hidden, targets, plan, head, reference)[1]
    value_bound, gradient_bound = (2e-5, 1e-5) if check.dtype == torch.float32 else (2e-4, 4e-3)
    return [
        Error("log-probs", _largest(log_probs, oracle.log_probs), value_bound),
        Error("training log-probs", _largest(answer.log_probs, oracle.log_probs), value_bound),
        Error("entropy", _largest(entropy, oracle.entropy), value_bound),
        *([] if kl is None else [Error("KL", _largest(kl, oracle.kl), value_bound)]),
        Error("mean loss", _largest(answer.loss_sum, exact.loss_sum) / len(counted), value_bound),
        Error("counts of metrics", _largest(answer.sums[:, 1], counts), 0.0),
        Error("largest of metrics", _relative(answer.maxima, maxima), 2 * value_bound),
        Error("gradient of hidden", _relative(hidden.grad, grad_hidden), gradient_bound),
        Error("gradient of weight", _relative(weight.grad, grad_weight), gradient_bound),
        Error("log-probs above 0", max(0.0, log_probs.max().item()), 0.0),
    ]


class _Oracle:
    """log_softmax, its entropy, and autograd, in float64."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, columns: int, reference: KLReference | None
    ) -> None:
        self._hidden, self._weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
        log_p = torch.log_softmax(self._hidden[rows] @ self._weight[:columns].t() / _TEMPERATURE, dim=-1)
        self.log_probs = log_p.gather(1, targets[:, None])[:, 0]
        self.entropy = -(log_p.exp() * log_p).sum(-1)
        self.kl = None
        if reference is not None:
            logits = reference.hidden_KH.double() @ reference.weight_VH[:columns].double().t()
            log_q = torch.log_softmax(logits / _TEMPERATURE, dim=-1)
            self.kl = (log_p.exp() * (log_p - log_q)).sum(-1)

    def loss(self, tokens: TokenBatch, loss: LossConfig) -> tuple[LossSums, Tensor, Tensor]:
        exact = dapo_loss(TokenOutputs(self.log_probs, self.entropy, self.kl), tokens, loss)
        grad_hidden, grad_weight = torch.autograd.grad(exact.loss_sum, (self._hidden, self._weight))
        return exact, grad_hidden, grad_weight


def _tokens(check: Check, log_probs: Tensor, generator: torch.Generator) -> TokenBatch:
    """Return a batch with old, reference and rollout log-probs at distances that reach every branch
    of the loss."""
    device = log_probs.device
    n = len(log_probs)

    def near(spread: float) -> Tensor:
        return log_probs.detach().float() + spread * torch.randn(n, generator=generator).to(device)

    def some() -> Tensor:
        return (torch.rand(n, generator=generator) < 0.7).to(device)

    return TokenBatch(
        weights=torch.ones(n, device=device),
        count=torch.tensor(n, device=device),
        advantages=torch.randn(n, generator=generator).to(device),
        old_log_probs=near(0.5) if check.has_old_log_probs else None,
        ref_log_probs=near(0.5) if check.loss.use_kl_loss else None,
        rollout_log_probs=near(0.1),
        is_current=some(),
        is_stale=some() if check.loss.report_stale else None,
        importance=2 * torch.rand(n, generator=generator).to(device) if check.has_importance else None,
        exp_mask=some() if check.loss.off_policy else None,
        sequence_log_ratio=near(0.1) - log_probs.detach().float() if check.loss.is_over_sequences else None,
    )


def _largest(value: Tensor | None, expected: Tensor | None) -> float:
    assert value is not None and expected is not None, "both were asked for"
    return (value.detach().double() - expected.detach()).abs().max().item()


def _relative(value: Tensor | None, expected: Tensor) -> float:
    assert value is not None, "the loss was sent backward"
    expected = expected.detach()
    return ((value.detach().double() - expected).norm() / expected.norm()).item()
