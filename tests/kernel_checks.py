"""Promises of the kernels, as functions of a case: small on the CPU (unit),
real sizes on GPUs (gpu).

The unit tests and tests/gpu run them. Needs torch, numpy, megatron_dapo.kernels and
benchmarks.memory, nothing else.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory import peak_bytes
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.metrics import stack_sums
from megatron_dapo.algorithms.policy_loss import Clip, OffPolicy
from megatron_dapo.kernels.fused_head import Head, fused_dapo_head, head_log_probs
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan
from megatron_dapo.kernels.token_loss import token_loss

LOSS = LossConfig(
    clip=Clip(0.2, 0.28, 3.0),
    use_kl_loss=True,
    kl_loss_coef=0.1,
    entropy_coef=0.01,
    report_entropy=True,
    off_policy=OffPolicy(),
    rollout_is_threshold=2.0,
)
MASKING = replace(LOSS, clip=replace(LOSS.clip, divergence=1e-3))
"""Of a random head's chances: a published divergence masks no token of dppo_tv and dppo_kl."""


class Bounds(NamedTuple):
    """Against float64 on the same, already rounded inputs: absolute;
    for gradients, parts of the norm.

    grad_hidden is rounded to the inputs' type once; grad_weight is a float32 sum over rounded
    gradients of logits. Log-probs of half-precision products on a GPU may be off by `truncation` of
    their logits besides.
    """

    log_prob: float
    mean_log_prob: float
    entropy: float
    grad_hidden: float
    grad_weight: float


BOUNDS = {
    torch.bfloat16: Bounds(2e-4, 1e-5, 2e-4, 4e-3, 3e-3),
    torch.float32: Bounds(2e-5, 5e-6, 2e-5, 2e-5, 2e-5),
}


# products that a tensor core adds to its accumulator at once, in half precision
TENSOR_CORE_STEP = 16


def truncation(hidden_LH: Tensor) -> float:
    """Return the relative error of a logit that a tensor core accumulates in float32.

    It truncates its accumulator after each step instead of rounding it (Fasi et al., "Numerical
    behavior of NVIDIA tensor cores", PeerJ CS 2021). The mean loss is half of the last of 24 bits,
    of partial sums of half the logit's size. All logits come out too small, so the errors of a row
    do not cancel. 0 on the CPU and in float32, which round.
    """
    if hidden_LH.device.type == "cpu" or hidden_LH.dtype == torch.float32:
        return 0.0
    return hidden_LH.size(1) / TENSOR_CORE_STEP * 2.0**-23 / 2 / 2


@dataclass(frozen=True, eq=False)
class HeadCase:
    """hidden_LH, weight_VH: leaves; of the V rows num_valid exist. counted_rows: [N] of the L rows,
    on the host; all the rest is [N]. Tokens reach every branch of LOSS. weight_VH.main_grad:
    float32, as Megatron's."""

    hidden_LH: Tensor
    weight_VH: Tensor
    num_valid: int
    counted_rows: np.ndarray
    targets: Tensor
    temperature: Tensor
    tokens: TokenBatch
    chunk_size: int

    @classmethod
    def make(
        cls, device, *, rows: int, hidden: int, vocab: int, chunk_size: int, dtype=torch.bfloat16, padding=0, seed=0
    ) -> "HeadCase":
        """Logits of standard deviation 3; about 30 % of the rows do not count;
        a temperature for every token."""
        g = torch.Generator(device).manual_seed(seed)
        normal = dict(generator=g, device=device)
        hidden_LH = torch.randn(rows, hidden, **normal).to(dtype).requires_grad_()
        weight = torch.nn.Parameter((torch.randn(vocab + padding, hidden, **normal) * 3 * hidden**-0.5).to(dtype))
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=device)
        counted = torch.rand(rows, **normal) < 0.7
        counted_rows = counted.nonzero()[:, 0].cpu().numpy()
        n = len(counted_rows)
        targets = torch.randint(0, vocab, (n,), **normal)
        targets[0], targets[-1] = 0, vocab - 1
        temperature = 0.7 + 0.6 * torch.rand(n, **normal)
        bare = cls(hidden_LH, weight, vocab, counted_rows, targets, temperature, None, chunk_size)
        return replace(bare, tokens=_tokens(oracle(bare).log_prob.float(), g))

    @property
    def device(self) -> torch.device:
        return self.hidden_LH.device

    @property
    def counted_hidden(self) -> Tensor:
        return self.hidden_LH[torch.from_numpy(self.counted_rows).to(self.device)]

    def head(self, **changes) -> Head:
        return replace(Head(self.weight_VH, None, self.num_valid, self.temperature), **changes)

    def plan(self, group: dist.ProcessGroup | None = None) -> RowPlan:
        return RowPlan.make(self.counted_rows, self.hidden_LH.size(0), self.chunk_size, self.device, group)


def _tokens(log_probs: Tensor, g: torch.Generator) -> TokenBatch:
    def noise(spread: float) -> Tensor:
        return spread * torch.randn(log_probs.shape, generator=g, device=log_probs.device)

    return TokenBatch(
        weights=0.5 + torch.rand(log_probs.shape, generator=g, device=log_probs.device),
        count=torch.tensor(log_probs.numel(), device=log_probs.device),
        advantages=noise(1.0),
        old_log_probs=log_probs + noise(0.5),
        ref_log_probs=log_probs + noise(0.5),
        rollout_log_probs=log_probs + noise(0.5),
        is_current=noise(1.0) > -1.0,
        exp_mask=(noise(1.0) > 1.0).float(),
    )


class Oracle(NamedTuple):
    """Float64. log_prob, entropy: [N]. logit_size: [N], |logit of the target| + mean |logit| under
    the distribution. Gradients, if asked for: [N, H], [V, H]."""

    log_prob: Tensor
    entropy: Tensor
    logit_size: Tensor
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None


@torch.no_grad()
def oracle(case: HeadCase, grad_log_prob: Tensor | None = None, grad_entropy: Tensor | None = None) -> Oracle:
    """log_softmax, its entropy, and the gradient
    of grad_log_prob . log_prob + grad_entropy . entropy; float64."""
    hidden, weight = case.counted_hidden.detach().double(), case.weight_VH.detach()[: case.num_valid].double()
    log_prob, entropy, size = (torch.empty(len(hidden), dtype=torch.float64, device=case.device) for _ in range(3))
    with_gradient = grad_log_prob is not None
    grad_hidden = torch.empty_like(hidden) if with_gradient else None
    grad_weight = torch.zeros(case.weight_VH.shape, dtype=torch.float64, device=case.device) if with_gradient else None
    for start in range(0, len(hidden), 512):  # float64 logits of a real vocabulary are large
        at = slice(start, start + 512)
        inverse = 1 / case.temperature[at].double()
        logits = (hidden[at] @ weight.t()) * inverse[:, None]
        log_p = torch.log_softmax(logits, -1)
        p = log_p.exp()
        log_prob[at] = log_p.gather(1, case.targets[at, None])[:, 0]
        entropy[at] = -(p * log_p).sum(-1)
        size[at] = (p * logits.abs()).sum(-1) + logits.abs().gather(1, case.targets[at, None])[:, 0]
        if with_gradient:
            g_lp, g_h = grad_log_prob[at].double(), grad_entropy[at].double()
            d = -p * (g_lp[:, None] + g_h[:, None] * (log_p + entropy[at, None]))
            d.scatter_add_(1, case.targets[at, None], g_lp[:, None])
            d *= inverse[:, None]
            grad_hidden[at] = d @ weight
            grad_weight[: case.num_valid] += d.t() @ hidden[at]
    return Oracle(log_prob, entropy, size, grad_hidden, grad_weight)


def check_values(case: HeadCase, use_triton: bool | None = None) -> None:
    """Log-probs and entropies are those of float64 log_softmax, and no log-prob is above 0."""
    expected = oracle(case)
    plan, head = case.plan(), case.head(use_triton=use_triton)
    log_prob, entropy = head_log_probs(case.hidden_LH, case.targets, plan, head, want_entropy=True)
    assert log_prob.dtype == torch.float32
    _values_close(case, log_prob, entropy, expected)
    without, none = head_log_probs(case.hidden_LH, case.targets, plan, head)
    assert none is None and torch.equal(without, log_prob)


def check_composed_gradients(case: HeadCase, use_triton: bool | None = None) -> None:
    """`linear_logprob_entropy`, sent backward with gradients for both of its answers."""
    g_lp, g_h = case.tokens.advantages, 0.1 * case.tokens.weights
    expected, bounds = oracle(case, g_lp, g_h), BOUNDS[case.hidden_LH.dtype]
    hidden, weight = case.counted_hidden.detach().requires_grad_(), case.weight_VH.detach().requires_grad_()
    log_prob, entropy = linear_logprob_entropy(
        hidden,
        weight,
        case.targets,
        temperature=case.temperature,
        num_valid_columns=case.num_valid,
        chunk_size=case.chunk_size,
        use_triton=use_triton,
    )
    ((log_prob * g_lp).sum() + (entropy * g_h).sum()).backward()
    _close_in_norm(hidden.grad, expected.grad_hidden, bounds.grad_hidden, "hidden")
    # handed out in the weight's own type: rounded once more than main_grad is
    rounding = torch.finfo(weight.dtype).eps / 2
    _close_in_norm(weight.grad, expected.grad_weight, bounds.grad_weight + rounding, "weight")


def check_fused_head(case: HeadCase, use_triton: bool | None = None, loss: LossConfig = LOSS) -> None:
    """Log-probs, entropies, loss and gradients of the fused head are those
    of float64 and `dapo_loss`."""
    bounds = BOUNDS[case.hidden_LH.dtype]
    answer = run_fused_head(case, use_triton, loss)
    loss_sum, expected = _expected_gradients(case, answer, loss)
    mean_error = (answer.loss_sum.double() - loss_sum).abs() / len(case.targets)
    assert mean_error <= bounds.mean_log_prob, f"mean loss off by {mean_error:.1e}"
    rows = torch.from_numpy(case.counted_rows).to(case.device)
    _close_in_norm(case.hidden_LH.grad[rows], expected.grad_hidden, bounds.grad_hidden, "hidden")
    _close_in_norm(case.weight_VH.main_grad, expected.grad_weight, bounds.grad_weight, "weight")
    skipped = torch.ones(len(case.hidden_LH), dtype=torch.bool, device=case.device)
    skipped[rows] = False
    assert not case.hidden_LH.grad[skipped].any() and not case.weight_VH.main_grad[case.num_valid :].any()
    scored, _ = head_log_probs(case.hidden_LH, case.targets, case.plan(), case.head(use_triton=use_triton))
    assert torch.equal(answer.log_probs, scored), "training and old log-probs differ: the first ratio would not be 1"


def _expected_gradients(case: HeadCase, answer, loss: LossConfig) -> tuple[Tensor, Oracle]:
    """Return the loss of the fused head's own log-probs (float64's), and its gradients,
    all in float64.

    The gradient jumps at the bounds of a ratio's clip. Rounding may put a token near a bound on the
    other side of it than float64's own log-probs. One such token among 10^4 is 1 % of the norm.
    """
    exact = oracle(case)
    entropy = exact.entropy.float() if answer.entropy is None else answer.entropy
    _values_close(case, answer.log_probs, entropy, exact)
    log_prob, entropy = answer.log_probs.double().requires_grad_(), entropy.double().requires_grad_()
    composed = dapo_loss(TokenOutputs(log_prob, entropy), _as_double(case.tokens), loss)
    composed.loss_sum.backward()
    g_h = torch.zeros_like(log_prob) if entropy.grad is None else entropy.grad
    return composed.loss_sum.detach(), oracle(case, log_prob.grad, g_h)


def check_fused_is_composed(case: HeadCase, use_triton: bool | None = None, loss: LossConfig = LOSS) -> None:
    """Against `linear_logprob_entropy` and `dapo_loss`, which compute each logit twice: the same
    bits of log-probs and entropies. Loss and metrics are the same but for the order of sums, and
    gradients to rounding."""
    hidden, weight = case.counted_hidden.detach().requires_grad_(), case.weight_VH.detach().requires_grad_()
    log_prob, entropy = linear_logprob_entropy(
        hidden,
        weight,
        case.targets,
        temperature=case.temperature,
        num_valid_columns=case.num_valid,
        chunk_size=case.chunk_size,
        use_triton=use_triton,
    )
    composed = dapo_loss(TokenOutputs(log_prob, entropy), case.tokens, loss)
    composed.loss_sum.backward()
    answer, bounds = run_fused_head(case, use_triton, loss), BOUNDS[case.hidden_LH.dtype]
    assert torch.equal(answer.log_probs, log_prob) and torch.equal(answer.entropy, entropy), "not the same bits"
    torch.testing.assert_close(answer.loss_sum, composed.loss_sum, rtol=1e-5, atol=1e-6 * len(case.targets))
    names, _ = metric_names(loss)
    sums = stack_sums(composed.sums, names, case.device)
    torch.testing.assert_close(answer.sums, sums, rtol=1e-5, atol=1e-6 * len(case.targets))
    rows = torch.from_numpy(case.counted_rows).to(case.device)
    rounding = torch.finfo(weight.dtype).eps / 2  # of the gradient in the weight's own type
    _close_in_norm(case.hidden_LH.grad[rows], hidden.grad.double(), bounds.grad_hidden, "hidden")
    _close_in_norm(case.weight_VH.main_grad, weight.grad.double(), bounds.grad_weight + rounding, "weight")


def run_fused_head(case: HeadCase, use_triton: bool | None = None, loss: LossConfig = LOSS):
    """One pass with gradients in hidden_LH.grad and weight_VH.main_grad, both cleared before."""
    case.hidden_LH.grad, case.weight_VH.grad = None, None
    case.weight_VH.main_grad.zero_()
    head = case.head(use_triton=use_triton)
    answer = fused_dapo_head(case.hidden_LH, case.targets, case.plan(), case.tokens, loss, head)
    answer.loss_sum.backward()
    return answer


def check_run_to_run(case: HeadCase, use_triton: bool | None = None) -> None:
    """The same bits twice: values, loss, metrics, gradients."""

    def once() -> list[Tensor]:
        answer = run_fused_head(case, use_triton)
        kept = [answer.loss_sum, answer.log_probs, answer.entropy, answer.sums, answer.maxima]
        return [t.detach().clone() for t in (*kept, case.hidden_LH.grad, case.weight_VH.main_grad)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def check_batch_invariance(case: HeadCase, use_triton: bool | None = None) -> None:
    """A row's log-prob and entropy are the same bits in any company and any order of rows."""
    head = case.head(use_triton=use_triton)
    whole = head_log_probs(case.hidden_LH, case.targets, case.plan(), head, want_entropy=True)
    n = len(case.counted_rows)
    cuts = [np.arange(1), np.arange(n // 3), np.arange(n // 2 - 1, n), np.arange(n)[::3].copy()]
    for places in cuts:
        index = torch.from_numpy(places).to(case.device)
        part = replace(case, counted_rows=case.counted_rows[places])
        some = head_log_probs(
            case.hidden_LH,
            case.targets[index],
            part.plan(),
            replace(head, temperature=case.temperature[index]),
            want_entropy=True,
        )
        assert all(torch.equal(a, b[index]) for a, b in zip(some, whole, strict=True)), f"{len(places)} of {n} rows"


def check_no_host_sync(case: HeadCase, use_triton: bool | None = None) -> None:
    """Old log-probs, loss and gradients never wait for the device.
    Run once before, to compile and to allocate."""
    for guard in (contextlib.nullcontext, lambda: forbidding_host_syncs(case.device)):
        case.hidden_LH.grad = None
        with guard():
            plan, head = case.plan(), case.head(use_triton=use_triton)
            scored, _ = head_log_probs(case.hidden_LH, case.targets, plan, head)
            tokens = replace(case.tokens, old_log_probs=scored)
            answer = fused_dapo_head(case.hidden_LH, case.targets, plan, tokens, LOSS, head)
            answer.loss_sum.backward()


def check_memory(case: HeadCase) -> None:
    """A training pass holds, besides the gradient of the hidden states, one chunk and some numbers
    per token. A chunk: float32 logits and their gradient in the inputs' type (and an eighth of that
    for an operation at work), four copies of its hidden rows."""
    work = functools.partial(run_fused_head, case)
    work()  # once before: libraries' own lasting memory is theirs
    case.hidden_LH.grad = None
    peak = peak_bytes(work, case.device)
    item, (num_rows, hidden), columns = case.hidden_LH.element_size(), case.hidden_LH.shape, len(case.weight_VH) + 8
    chunk = case.chunk_size * (1.125 * columns * (4 + item) + 4 * hidden * item)
    bound = case.hidden_LH.nbytes + chunk + 256 * num_rows
    assert peak <= bound, f"{peak / 2**20:.1f} MiB at the peak, expected at most {bound / 2**20:.1f}"


def check_over_ranks(case: HeadCase, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    """The vocabulary cut over the ranks of `group`, with all hidden rows or a slice each. Float64's
    answers, and the same log-probs to the bit on every rank. Collective; the same case on every
    rank."""
    rank, size = group.rank(), group.size()
    bounds, rows_here = BOUNDS[case.hidden_LH.dtype], len(case.hidden_LH) // size
    columns = slice(rank * len(case.weight_VH) // size, (rank + 1) * len(case.weight_VH) // size)
    rows = slice(rank * rows_here, (rank + 1) * rows_here) if sequence_parallel else slice(None)
    weight = torch.nn.Parameter(case.weight_VH.detach()[columns].clone())
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=case.device)
    hidden = case.hidden_LH.detach()[rows].clone().requires_grad_()
    plan = case.plan(group if sequence_parallel else None)
    head = replace(case.head(), weight_VH=weight, group=group)
    scored, _ = head_log_probs(hidden, case.targets, plan, head)
    answer = fused_dapo_head(hidden, case.targets, plan, case.tokens, LOSS, head)
    answer.loss_sum.backward()

    gathered = [torch.empty_like(scored) for _ in range(size)]
    dist.all_gather(gathered, scored, group=group)
    assert all(torch.equal(scored, other) for other in (*gathered, answer.log_probs))
    _, true = _expected_gradients(case, answer, LOSS)
    grad_hidden = torch.zeros(case.hidden_LH.shape, dtype=torch.float64, device=case.device)
    grad_hidden[torch.from_numpy(case.counted_rows).to(case.device)] = true.grad_hidden
    # every rank's share is rounded before they are added, and shares are larger than their sum
    _close_in_norm(hidden.grad, grad_hidden[rows], size * bounds.grad_hidden, "hidden")
    _close_in_norm(weight.main_grad, true.grad_weight[columns], bounds.grad_weight, "weight")


def check_token_loss(case: HeadCase, loss: LossConfig = LOSS) -> None:
    """Loss, gradients and every metric are those of `dapo_loss` in float64."""
    expected = oracle(case)
    log_prob, entropy = expected.log_prob.float(), expected.entropy.float()
    ours = token_loss(log_prob, entropy, case.tokens, loss)
    exact = token_loss(log_prob.double(), entropy.double(), _as_double(case.tokens), loss)
    assert ours.grad_log_probs.dtype == torch.float32
    # float32: a few roundings of terms of order 1, in sums of N of them
    torch.testing.assert_close(ours.loss_sum.double(), exact.loss_sum, rtol=1e-5, atol=1e-6 * len(log_prob))
    _close_in_norm(ours.grad_log_probs, exact.grad_log_probs, 1e-5, "log-probs")
    _close_in_norm(ours.grad_entropy, exact.grad_entropy, 1e-6, "entropy")
    torch.testing.assert_close(ours.sums, exact.sums, rtol=1e-5, atol=1e-6 * len(log_prob))
    torch.testing.assert_close(ours.maxima, exact.maxima, rtol=1e-5, atol=1e-6)
    if loss.policy_loss in ("dppo_tv", "dppo_kl"):
        names, _ = metric_names(loss)
        masked = [exact.sums[names.index(f"actor/on_pg_clipfrac{side}")][0] for side in ("", "_lower")]
        assert min(masked) > 0, "no token is masked on a side, so that nothing is said of the mask"


def _values_close(case: HeadCase, log_prob: Tensor, entropy: Tensor, expected: Oracle) -> None:
    bounds = BOUNDS[case.hidden_LH.dtype]
    assert (log_prob <= 0).all(), "log-probs above 0"
    error = (log_prob.double() - expected.log_prob).abs()
    cut_off = truncation(case.hidden_LH) * expected.logit_size
    assert (error <= bounds.log_prob + cut_off).all(), f"log-prob off by {error.max():.1e}"
    allowed = bounds.mean_log_prob + cut_off.mean()
    assert error.mean() <= allowed, f"log-prob off by {error.mean():.1e} in the mean, {allowed:.1e} allowed"
    error = (entropy.double() - expected.entropy).abs().max()
    assert error <= bounds.entropy, f"entropy off by {error:.1e}"


def _close_in_norm(actual: Tensor, expected: Tensor, bound: float, what: str) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= bound, f"gradient of {what} off by {error:.1e} of its norm"


def _as_double(tokens: TokenBatch) -> TokenBatch:
    wide = {k: v.double() for k, v in vars(tokens).items() if isinstance(v, Tensor) and v.dtype == torch.float32}
    return replace(tokens, **wide)


# --------------------------------------------------------------------------------------- host syncs


@contextlib.contextmanager
def forbidding_host_syncs(device: torch.device) -> Iterator[None]:
    """Inside, waiting for the device raises. On the CPU, without any waiting, reading a value on
    the host raises."""
    if device.type == "cpu":
        with CountedReads(forbidden=True):
            yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class CountedReads(TorchDispatchMode):
    """Counts operations that need values on the host for a result or its shape;
    with `forbidden` it raises instead."""

    READING = ("local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __init__(self, forbidden: bool = False) -> None:
        super().__init__()
        self.number = 0
        self._forbidden = forbidden

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0].strip("_")
        by_mask = name in ("index", "index_put") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if by_mask or name.startswith(self.READING):
            if self._forbidden:
                raise RuntimeError(f"{func} reads values on the host")
            self.number += 1
        return func(*args, **(kwargs or {}))
