"""The policy loss of given log-probs, with its gradient and every metric.

Time, operators, waits for the device, error against float64. Ratios are to eager torch; G1, G3 and
G4 are a head's plain products at the same number of tokens.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command_line import attempt, collect, parse, run
from benchmarks.measure import Seconds, plain_products, timed
from benchmarks.memory import peak_bytes
from benchmarks.provider import Provider, need
from benchmarks.report import Row, ShapeResult
from benchmarks.shapes import Shape
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.algorithms.policy_loss import Clip, OffPolicy
from megatron_dapo.kernels.token_loss import token_loss

# every term of the loss and every metric
CONFIG = LossConfig(
    Clip(0.2, 0.28, 10.0),
    use_kl_loss=True,
    kl_loss_coef=0.001,
    entropy_coef=0.01,
    report_entropy=True,
    off_policy=OffPolicy(),
    rollout_is_threshold=2.0,
)
REPEATS = {"cpu": 20, "cuda": 50}  # calls in the mean of one sample of time


@dataclass(frozen=True, eq=False)
class LossCase:
    """The loss's inputs."""

    log_probs: Tensor  # [T] float32, as from a head
    entropy: Tensor  # [T] float32, as from a head
    tokens: TokenBatch  # half of the weights are 0


class LossAnswer(NamedTuple):
    loss_sum: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor


def make_case(num_tokens: int, device: torch.device, seed: int = 0) -> LossCase:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=generator, device=device)

    log_probs = -normal(1.0).abs()
    weights = (torch.rand(num_tokens, generator=generator, device=device) < 0.5).float()
    tokens = TokenBatch(
        weights=weights,
        count=weights.sum(),
        advantages=normal(1.0),
        old_log_probs=log_probs + normal(0.2),
        ref_log_probs=log_probs + normal(0.5),
        rollout_log_probs=log_probs + normal(0.2),
        exp_mask=normal(1.0) > 1.0,
    )
    return LossCase(log_probs, normal(1.0).abs(), tokens)


def ours():
    def loss(case: LossCase) -> LossAnswer:
        return LossAnswer(*token_loss(case.log_probs, case.entropy, case.tokens, CONFIG)[:3])

    return loss


def eager(function=dapo_loss):
    def loss(case: LossCase) -> LossAnswer:
        log_probs, entropy = (t.detach().requires_grad_() for t in (case.log_probs, case.entropy))
        loss_sum = function(TokenOutputs(log_probs, entropy), case.tokens, CONFIG).loss_sum
        return LossAnswer(loss_sum.detach(), *torch.autograd.grad(loss_sum, (log_probs, entropy)))

    return loss


def compiled():
    return eager(torch.compile(dapo_loss, dynamic=False))


def verl_vanilla():
    """Return verl's own eager loss: only the policy term, averaged; it reports four metrics."""
    module = need("verl.trainer.ppo.core_algos")
    omegaconf = need("omegaconf")
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}
    config = omegaconf.OmegaConf.create(clip)

    def loss(case: LossCase) -> LossAnswer:
        log_probs, tokens = case.log_probs.detach().requires_grad_(), case.tokens
        rows = (tokens.old_log_probs, log_probs, tokens.advantages, tokens.weights)
        mean = module.compute_policy_loss_vanilla(*(t[None] for t in rows), "token-mean", config)[0]
        loss_sum = mean * tokens.count
        return LossAnswer(loss_sum.detach(), *torch.autograd.grad(loss_sum, log_probs), None)

    return loss


PROVIDERS = (
    Provider("ours (c)", ours, ours=True),
    Provider("eager", eager, ours=True),
    Provider("torch.compile", compiled, slow_start=True),
    Provider("verl vanilla", verl_vanilla, entropy=False),
)


class Count(TorchDispatchMode):
    """Operators that compute something, and reads of a value by the host: its waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits += 1
        elif not func.is_view and "detach" not in func.name():
            self.operators += 1
        return func(*args, **(kwargs or {}))


def errors(case: LossCase, answer: LossAnswer) -> dict[str, float]:
    """Return errors against the eager loss in float64.

    The loss's is relative, a gradient's is the norm of the difference over the norm.
    """
    tensors = {name: value for name, value in vars(case.tokens).items() if value is not None}
    fields = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
    right = eager()(LossCase(case.log_probs.double(), case.entropy.double(), TokenBatch(**fields)))
    pairs = zip(LossAnswer._fields, answer, right, strict=True)
    return {f"{name}_rel": ((a.double() - b).norm() / b.norm()).item() for name, a, b in pairs}


def seconds(loss: Callable, case: LossCase) -> Seconds:
    repeats = REPEATS[case.log_probs.device.type]
    _, total = timed(case.log_probs.device, lambda: [loss(case) for _ in range(repeats)])
    return {"forward": total / repeats, "total": total / repeats}


def measure(options: argparse.Namespace, shape: Shape, chosen: dict) -> ShapeResult:
    case = make_case(shape.num_tokens, options.device)
    rows = {name: Row(name, entropy=provider.entropy) for name, (provider, _) in chosen.items()}
    for name, (provider, loss) in chosen.items():
        rows[name].failure = attempt(provider, lambda r=rows[name], p=provider, f=loss: _measure_once(r, p, f, case))
    samplers = {
        name: lambda f=loss: seconds(f, case) for name, (_, loss) in chosen.items() if rows[name].failure is None
    }
    sizes = (shape.num_tokens, shape.vocab_size)
    hidden, weight = (torch.randn(n, shape.hidden_size, device=options.device, dtype=options.dtype) for n in sizes)
    result = collect(shape, options, rows, samplers, plain_products(hidden, weight), relative_to=("eager",))
    return replace(result, dtype="float32")


def _measure_once(row: Row, provider: Provider, loss: Callable, case: LossCase) -> None:
    answer = loss(case)
    if provider.entropy:
        row.errors = errors(case, answer)
    row.peak_bytes = peak_bytes(lambda: loss(case), case.log_probs.device)
    if not provider.slow_start:  # an operator of compiled code is not one of torch's
        with Count() as count:
            loss(case)
        row.counts = {"operators": count.operators, "waits": count.waits}


def main(arguments: Sequence[str] | None = None) -> dict:
    options = parse(__doc__, PROVIDERS, arguments, cpu_shapes=("cpu-32k-tokens",))
    return run("loss", options, PROVIDERS, measure, unit="us")


if __name__ == "__main__":
    main()
