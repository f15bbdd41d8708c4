"""Log-prob and entropy from logits that somebody else computed: time over one pass that reads and writes them, peak
memory above the logits, error against float64. G1, G3 and G4 are the head's plain products at the same shape."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.command_line import attempt, collect, parse, run
from benchmarks.logits_providers import PROVIDERS
from benchmarks.measure import Seconds, plain_products, timed
from benchmarks.memory import peak_bytes
from benchmarks.provider import Provider
from benchmarks.report import Row, ShapeResult
from benchmarks.shapes import Shape

TOKENS_FOR_ERRORS = 256


@dataclass(frozen=True, eq=False)
class LogitsCase:
    """logits_TV: what a head would have given, in a buffer that may be overwritten; copied anew from `kept` each time.

    grad_log_probs, grad_entropy: [T], what a loss would send back.
    """

    kept: Tensor
    logits_TV: Tensor
    targets_T: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor

    @classmethod
    def make(cls, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> "LogitsCase":
        generator = torch.Generator(device).manual_seed(seed)
        size = (shape.num_tokens, shape.vocab_size)
        kept = torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(2)
        targets = torch.randint(0, shape.vocab_size, size[:1], generator=generator, device=device)
        return cls(
            kept, kept.clone(), targets, *torch.randn(2, shape.num_tokens, generator=generator, device=device).unbind()
        )

    def restore(self) -> None:
        self.logits_TV.copy_(self.kept)


class _FromModel(torch.autograd.Function):
    """The logits as a head's output: no leaf, so their gradient is handed on to `receiver` and not kept beside them."""

    @staticmethod
    def forward(ctx, parameter, logits, receiver):
        ctx.receiver = receiver
        return logits.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.receiver.append(gradient)
        return None, None, None


def forward(function: Callable, case: LogitsCase, with_entropy: bool, receiver: list) -> tuple[Tensor, Tensor | None]:
    parameter = torch.zeros((), device=case.logits_TV.device, requires_grad=True)
    logits = _FromModel.apply(parameter, case.logits_TV, receiver)
    return function(logits, case.targets_T, with_entropy)


def backward(case: LogitsCase, log_probs: Tensor, entropy: Tensor | None) -> None:
    pairs = [(log_probs, case.grad_log_probs), (entropy, case.grad_entropy)]
    pairs = [(output, gradient.to(output.dtype)) for output, gradient in pairs if output is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))


def one_pass(function: Callable, case: LogitsCase, with_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log-probs, entropy, gradient of the logits)."""
    receiver: list[Tensor] = []
    answer = forward(function, case, with_entropy, receiver)
    backward(case, *answer)
    return *answer, receiver[0]


def seconds(function: Callable, case: LogitsCase, with_entropy: bool) -> Seconds:
    case.restore()
    receiver: list[Tensor] = []
    answer, there = timed(case.kept.device, lambda: forward(function, case, with_entropy, receiver))
    _, back = timed(case.kept.device, lambda: backward(case, *answer))
    return {"forward": there, "backward": back, "total": there + back}


def errors(case: LogitsCase, answer: tuple, with_entropy: bool) -> dict[str, float]:
    """Largest error of log-prob and entropy; the gradient's as the norm of the difference over the norm."""
    logits = case.kept.double().requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    right = {"log_prob": log_p.gather(1, case.targets_T[:, None])[:, 0], "entropy": -(log_p.exp() * log_p).sum(-1)}
    loss = right["log_prob"] @ case.grad_log_probs.double()
    if with_entropy:
        loss = loss + right["entropy"] @ case.grad_entropy.double()
    loss.backward()
    found = {
        f"{name}_max": (ours.detach().double() - right[name].detach()).abs().max().item()
        for name, ours in zip(right, answer, strict=False)
        if ours is not None
    }
    return found | {"grad_logits_rel": ((answer[2].double() - logits.grad).norm() / logits.grad.norm()).item()}


def measure(options: argparse.Namespace, shape: Shape, chosen: dict) -> ShapeResult:
    small_shape = replace(shape, num_tokens=min(shape.num_tokens, TOKENS_FOR_ERRORS))
    small = LogitsCase.make(small_shape, options.device, options.dtype)
    rows = {name: Row(name, entropy=p.entropy and not options.no_entropy) for name, (p, _) in chosen.items()}
    for name, (provider, function) in chosen.items():
        _measure_errors(rows[name], provider, function, small)
    case = LogitsCase.make(shape, options.device, options.dtype)
    for name, (provider, function) in chosen.items():
        _measure_memory(rows[name], provider, function, case)
    samplers = {
        name: lambda f=function, e=rows[name].entropy: seconds(f, case, e)
        for name, (_, function) in chosen.items()
        if rows[name].failure is None
    }
    return collect(shape, options, rows, samplers, _yardstick(shape, case), relative_to=("naive",))


def _yardstick(shape: Shape, case: LogitsCase) -> Callable[[], Seconds]:
    """The plain products, and a pass that reads the logits and writes them elsewhere: the least a gradient can do."""
    sizes = (shape.num_tokens, shape.vocab_size)
    hidden, weight = (torch.randn(n, shape.hidden_size, device=case.kept.device, dtype=case.kept.dtype) for n in sizes)
    products = plain_products(hidden, weight)

    def sample() -> Seconds:
        _, copy = timed(case.kept.device, case.restore)
        return {"copy": copy, **products()}

    return sample


def _measure_errors(row: Row, provider: Provider, function: Callable, case: LogitsCase) -> None:
    def work() -> None:
        case.restore()
        row.errors = errors(case, one_pass(function, case, row.entropy), row.entropy)

    row.failure = attempt(provider, work)


def _measure_memory(row: Row, provider: Provider, function: Callable, case: LogitsCase) -> None:
    def work() -> None:
        if provider.slow_start or case.kept.device.type == "cuda":
            case.restore()
            one_pass(function, case, row.entropy)
        case.restore()
        row.peak_bytes = peak_bytes(lambda: one_pass(function, case, row.entropy), case.kept.device)

    row.failure = row.failure or attempt(provider, work)


def main(arguments: Sequence[str] | None = None) -> dict:
    options = parse(__doc__, PROVIDERS, arguments, cpu_shapes=("cpu-1k", "cpu-4k-logits"))
    return run("from logits", options, PROVIDERS, measure)


if __name__ == "__main__":
    main()
