"""Cases of the training head and their float64 oracle, for one process and for several."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.algorithms.policy_loss import Clip

LOSS = LossConfig(
    clip=Clip(0.2, 0.28, 3.0),
    use_kl_loss=True,
    kl_loss_coef=0.1,
    entropy_coef=0.03,
    report_entropy=True,
)


@dataclass(frozen=True)
class Case:
    """rows is a multiple of 4, so that up to four ranks can each hold a slice;
    vocab: of which num_valid exist."""

    rows: int = 40
    hidden: int = 19
    vocab: int = 56
    num_valid: int = 53
    mask: str = "some"
    chunk_size: int = 7
    offset: float = 0.0
    temperature: str = "one"
    entropy: bool = True
    num_micro_batches: int = 1
    full_kl: bool = False  # in the place of the estimate
    dtype: torch.dtype = torch.float64


CASES = {
    "plain": Case(),
    "all_counted": Case(mask="all"),
    "none_counted": Case(mask="none"),
    "no_rows": Case(rows=0),
    "one_slice": Case(mask="last_slice"),
    "one_row": Case(mask="one"),
    "one_chunk": Case(chunk_size=1000),
    "chunks_of_one": Case(chunk_size=1),
    "chunk_divides": Case(mask="all", chunk_size=8),
    "empty_share": Case(num_valid=13),
    "odd_shapes": Case(rows=44, hidden=7, vocab=60, num_valid=59, mask="all"),
    "temperatures": Case(temperature="per_token"),
    "no_entropy": Case(entropy=False),
    "offset_up": Case(offset=1000.0, dtype=torch.float32),
    "offset_down": Case(offset=-1000.0, dtype=torch.float32),
    "float32": Case(dtype=torch.float32),
    "bfloat16": Case(dtype=torch.bfloat16, hidden=64),
    "accumulated": Case(num_micro_batches=3),
    "full_kl": Case(full_kl=True),
    "full_kl_without_entropy": Case(full_kl=True, entropy=False, temperature="per_token", num_micro_batches=2),
    "full_kl_empty_share": Case(full_kl=True, num_valid=13, mask="last_slice", chunk_size=1),
    "full_kl_no_rows": Case(full_kl=True, rows=0),
    "full_kl_offset": Case(full_kl=True, offset=1000.0, dtype=torch.float32),
    "full_kl_bfloat16": Case(full_kl=True, dtype=torch.bfloat16, hidden=64),
}
# the same rows in different company; a whole number of cache lines per row,
# as with every real hidden size
SAME_ROWS = {
    f"same_rows_{chunk_size}": Case(hidden=64, vocab=256, num_valid=250, chunk_size=chunk_size, dtype=torch.float32)
    for chunk_size in (1, 7, 16, 1000)
}
CASES |= SAME_ROWS


@dataclass(frozen=True, eq=False)
class Inputs:
    """Of one micro-batch; hidden_LH and weight_VH are whole, as the reference's. counted: ascending
    rows; targets and tokens: of those."""

    hidden_LH: Tensor
    weight_VH: Tensor
    counted: np.ndarray
    targets: Tensor
    tokens: TokenBatch
    temperature: float | Tensor
    ref_hidden_LH: Tensor
    ref_weight_VH: Tensor


def loss_of(case: Case) -> LossConfig:
    loss = LOSS if case.entropy else replace(LOSS, entropy_coef=0.0, report_entropy=False)
    return replace(loss, kl_loss_type="full") if case.full_kl else loss


def inputs_of(case: Case, micro_batch: int = 0) -> Inputs:
    """The same in every process. Old, reference and rollout log-probs lie around the true ones, so
    that every branch of the loss is taken."""
    g = torch.Generator().manual_seed(100 + micro_batch)
    weight = torch.randn(case.vocab, case.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hidden = torch.randn(case.rows, case.hidden, generator=g, dtype=torch.float64)
    weight *= 3 * case.hidden**-0.5
    ref_hidden = torch.randn(case.rows, 11, generator=torch.Generator().manual_seed(200 + micro_batch)).double()
    ref_weight = torch.randn(case.vocab, 11, generator=torch.Generator().manual_seed(2)).double()
    if case.offset:
        hidden[:, 0], weight[:, 0] = 1.0, case.offset
        ref_hidden[:, 0], ref_weight[:, 0] = 1.0, -case.offset
    hidden, weight, ref_hidden, ref_weight = (x.to(case.dtype) for x in (hidden, weight, ref_hidden, ref_weight))
    counted = np.flatnonzero(_mask(case, g))
    targets = torch.randint(0, case.num_valid, (len(counted),), generator=g)
    temperature: float | Tensor = 0.8
    if case.temperature == "per_token":
        temperature = 0.5 + torch.rand(len(counted), generator=g, dtype=torch.float64)
    true, _ = log_probs_of(hidden.double(), weight.double(), case, counted, targets, temperature)

    def near(spread: float) -> Tensor:
        return true + spread * torch.randn(len(counted), generator=g, dtype=torch.float64)

    tokens = TokenBatch(
        weights=0.5 + torch.rand(len(counted), generator=g, dtype=torch.float64),
        count=torch.tensor(len(counted)),
        advantages=torch.randn(len(counted), generator=g, dtype=torch.float64),
        old_log_probs=near(0.6),
        ref_log_probs=near(0.6),
        rollout_log_probs=near(0.05),
    )
    return Inputs(hidden, weight, counted, targets, tokens, temperature, ref_hidden, ref_weight)


def _mask(case: Case, g: torch.Generator) -> np.ndarray:
    rows = np.arange(case.rows)
    return {
        "some": (torch.rand(case.rows, generator=g) < 0.6).numpy(),
        "all": rows >= 0,
        "none": rows < 0,
        "one": rows == 17,
        "last_slice": rows >= case.rows * 3 // 4,
    }[case.mask]


def log_probs_of(hidden, weight, case: Case, counted, targets, temperature) -> tuple[Tensor, Tensor]:
    """torch's log_softmax over the valid columns, and its entropy, in the dtype given."""
    log_p = distribution(hidden, weight, case, counted, temperature)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def distribution(hidden, weight, case: Case, counted, temperature) -> Tensor:
    """log p [N, num_valid]."""
    logits = hidden[torch.from_numpy(counted)] @ weight[: case.num_valid].t()
    return torch.log_softmax(logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature), -1)


def full_kl_of(hidden, weight, case: Case, inputs: Inputs) -> Tensor:
    """torch's kl_div [N], gradient to hidden and weight."""
    log_p = distribution(hidden, weight, case, inputs.counted, inputs.temperature)
    its = inputs.ref_hidden_LH.double(), inputs.ref_weight_VH.double()
    log_q = distribution(*its, case, inputs.counted, inputs.temperature)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


@dataclass(frozen=True, eq=False)
class Answer:
    """log_probs, entropy, kl: of the last micro-batch; grad_hidden too, whole;
    grad_weight: of all of them."""

    loss_sum: Tensor
    log_probs: Tensor
    entropy: Tensor
    kl: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def oracle(case: Case) -> Answer:
    """float64 autograd of log_softmax and `dapo_loss` on the inputs as rounded
    to the case's dtype."""
    weight = inputs_of(case).weight_VH.double().requires_grad_()
    for micro_batch in range(case.num_micro_batches):
        inputs = inputs_of(case, micro_batch)
        hidden = inputs.hidden_LH.double().requires_grad_()
        log_probs, entropy = log_probs_of(hidden, weight, case, inputs.counted, inputs.targets, inputs.temperature)
        kl = full_kl_of(hidden, weight, case, inputs)
        loss_sum = dapo_loss(TokenOutputs(log_probs, entropy, kl), inputs.tokens, loss_of(case)).loss_sum
        loss_sum.backward()
    grad_weight = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return Answer(*(x.detach() for x in (loss_sum, log_probs, entropy, kl)), hidden.grad, grad_weight)


def bounds(case: Case) -> tuple[float, float, float]:
    """(absolute, of log-probs and entropy; relative to the norm, of d hidden; of d weight).

    float32 accumulation: a logit of size x carries an error of some eps * (|x| + sqrt(H) spread).
    bf16 gradients of hidden, and gradients of the logits before the products, are rounded to 8 bits
    once.
    """
    if case.dtype == torch.float64:
        return 1e-11, 1e-11, 1e-11
    eps = torch.finfo(torch.float32).eps
    values = 4 * eps * (abs(case.offset) + 30) / 0.8
    return (values, 4e-3, 3e-3) if case.dtype == torch.bfloat16 else (values, 4 * values, 4 * values)
