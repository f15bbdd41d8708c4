"""The inputs of a measured head: hidden states, weight, targets, DAPO loss; float64 answers."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.algorithms.policy_loss import Clip
from megatron_dapo.common.sizes import ceil_div

ENTROPY_COEF = 0.01
TOKENS_PER_SEQUENCE = 64  # advantages are constant within a sequence, as GRPO's are


@dataclass(frozen=True, eq=False)
class HeadCase:
    """The inputs of a head."""

    hidden_TH: Tensor  # a leaf with gradient
    weight_VH: torch.nn.Parameter  # a leaf; main_grad: [V, H], Megatron's place for the gradient
    targets_T: Tensor
    tokens: TokenBatch  # every token counts, weight 1
    loss: LossConfig  # clip-higher with an entropy bonus if `with_entropy`

    @property
    def device(self) -> torch.device:
        return self.hidden_TH.device

    @property
    def with_entropy(self) -> bool:
        return self.loss.report_entropy

    def without_entropy(self) -> "HeadCase":
        """Return the same for a head without the entropy."""
        return replace(self, loss=replace(self.loss, report_entropy=False, entropy_coef=0.0))

    def clear_gradients(self) -> None:
        self.hidden_TH.grad = self.weight_VH.grad = None
        self.weight_VH.main_grad.zero_()
        self.weight_VH.grad_added_to_main_grad = False

    def collect_weight_gradient(self) -> None:
        """Add a ready gradient to main_grad unless the layer did, as Megatron's DDP."""
        if not self.weight_VH.grad_added_to_main_grad:
            self.weight_VH.main_grad.add_(self.weight_VH.grad)
        self.weight_VH.grad = None


class HeadAnswer(NamedTuple):
    """The answer of a forward pass."""

    loss: Tensor | None  # to be sent backward; None for a pass without gradient
    log_probs: Tensor | None
    entropy: Tensor | None = None  # None if not computed


def make_case(shape: Shape, device: torch.device, dtype: torch.dtype, *, with_entropy: bool, seed: int = 0) -> HeadCase:
    """Return a case with logits of standard deviation 2.

    Old log-probs are 0.1 away from the current ones, so that some ratios are clipped.
    """
    generator = torch.Generator(device).manual_seed(seed)
    num_tokens = shape.num_tokens

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    hidden = normal(num_tokens, shape.hidden_size).to(dtype).requires_grad_()
    weight = torch.nn.Parameter((normal(shape.vocab_size, shape.hidden_size) * 2 / shape.hidden_size**0.5).to(dtype))
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=device)
    targets = torch.randint(0, shape.vocab_size, (num_tokens,), generator=generator, device=device)
    sequences = ceil_div(num_tokens, TOKENS_PER_SEQUENCE)
    tokens = TokenBatch(
        weights=torch.ones(num_tokens, device=device),
        count=torch.tensor(float(num_tokens), device=device),
        advantages=normal(sequences).repeat_interleave(TOKENS_PER_SEQUENCE)[:num_tokens],
        old_log_probs=plain_log_probs(hidden, weight, targets) + 0.1 * normal(num_tokens),
    )
    loss = LossConfig(clip=Clip(0.2, 0.28, None), report_mismatch=False)
    if with_entropy:
        loss = replace(loss, entropy_coef=ENTROPY_COEF, report_entropy=True)
    case = HeadCase(hidden, weight, targets, tokens, loss)
    case.clear_gradients()
    return case


@torch.no_grad()
def plain_log_probs(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, rows: int = 1024) -> Tensor:
    """Return [T] float32, a few rows of logits at a time."""
    parts = zip(hidden_TH.split(rows), targets_T.split(rows), strict=True)
    return torch.cat(
        [-torch.nn.functional.cross_entropy((h @ weight_VH.t()).float(), t, reduction="none") for h, t in parts]
    )


def loss_of(case: HeadCase, log_probs: Tensor, entropy: Tensor | None) -> HeadAnswer:
    """Return the answer of a head that gives log-probs and leaves the loss to others."""
    outputs = TokenOutputs(log_probs.float(), None if entropy is None else entropy.float())
    return HeadAnswer(dapo_loss(outputs, case.tokens, case.loss).loss_sum, log_probs.detach(), entropy)


class Exact(NamedTuple):
    """The answer in float64, of the case's own numbers."""

    log_probs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def exact(case: HeadCase) -> Exact:
    """Return log-softmax, entropy, loss and gradients in float64.

    Holds several [T, V] tensors: for few tokens.
    """
    hidden, weight = (t.detach().double().requires_grad_() for t in (case.hidden_TH, case.weight_VH))
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    log_probs = log_p.gather(1, case.targets_T[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    fields = {name: value.double() for name, value in vars(case.tokens).items() if value is not None}
    dapo_loss(TokenOutputs(log_probs, entropy), TokenBatch(**fields), case.loss).loss_sum.backward()
    return Exact(log_probs.detach(), entropy.detach(), hidden.grad, weight.grad)


def errors(case: HeadCase, answer: HeadAnswer, reference: Exact) -> dict[str, float]:
    """Return the largest and mean error of log-prob and entropy, and errors of the gradients.

    A gradient's error is the norm of the difference over the norm.
    """
    errors_by_name: dict[str, float] = {}
    for name, ours in (("log_prob", answer.log_probs), ("entropy", answer.entropy)):
        if ours is not None:
            wrong = (ours.detach().double() - getattr(reference, {"log_prob": "log_probs"}.get(name, name))).abs()
            errors_by_name |= {f"{name}_max": wrong.max().item(), f"{name}_mean": wrong.mean().item()}
    if answer.loss is not None:
        pairs = (
            ("grad_hidden", case.hidden_TH.grad, reference.grad_hidden),
            ("grad_weight", case.weight_VH.main_grad, reference.grad_weight),
        )
        errors_by_name |= {
            f"{name}_rel": ((ours.double() - right).norm() / right.norm()).item() for name, ours, right in pairs
        }
    return errors_by_name
