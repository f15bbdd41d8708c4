"""The KL over the whole vocabulary from hidden states: its number, its gradient, its memory.

Over ranks, and inside the training head: tests/distributed/test_head.py and test_full_kl.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.memory import peak_bytes
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.kernels.full_kl import linear_full_kl
from megatron_dapo.kernels.fused_head import Head, KLReference, fused_dapo_head
from megatron_dapo.kernels.row_plan import RowPlan
from megatron_dapo.platform.device import prepare_megatron

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
LOSS = LossConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="full", report_mismatch=False)


def case(rows: int, hidden: int, vocab: int, dtype=torch.float64, ref_hidden: int | None = None) -> list[torch.Tensor]:
    """hidden, weight, and those of the reference."""
    g = torch.Generator().manual_seed(rows)
    shapes = ((rows, hidden), (vocab, hidden), (rows, ref_hidden or hidden), (vocab, ref_hidden or hidden))
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def test_number_and_gradient_are_those_of_kl_div_on_all_logits():
    hidden, weight, *reference = case(11, 6, 17, ref_hidden=9)
    temperature = 0.5 + torch.rand(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden.requires_grad_(), weight.requires_grad_(), reference[1].requires_grad_()
    settings = {"temperature": temperature, "num_valid_columns": 15, "chunk_size": 4}
    kl = linear_full_kl(hidden, weight, *reference, **settings)
    log_p, log_q = (((h @ w[:15].t()) / temperature[:, None]).log_softmax(-1) for h, w in ((hidden, weight), reference))
    expected = F.kl_div(log_q.detach(), log_p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl, expected, rtol=0, atol=1e-13)
    incoming = torch.randn(11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((kl * incoming).sum(), (hidden, weight, reference[1]), allow_unused=True)
    expected_gradients = torch.autograd.grad((expected * incoming).sum(), (hidden, weight))
    assert gradients[2] is None, "the reference learns nothing"
    for a, b in zip(gradients, expected_gradients, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda h, w: linear_full_kl(h, w, *reference, **settings), (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_between_equal_models_it_is_exactly_0(dtype):
    hidden, weight, _, _ = case(20, 16, 50, dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    kl = linear_full_kl(hidden, weight, hidden.detach(), weight.detach(), temperature=0.7, chunk_size=8)
    kl.sum().backward()
    assert kl.abs().max() == hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_far_apart_it_stays_finite():
    """Even if q has no float32 number left, the difference of log-probs is finite."""
    hidden, weight, *_ = case(5, 4, 30, torch.float32)
    hidden.requires_grad_()
    kl = linear_full_kl(hidden, weight, -200 * hidden.detach(), weight)
    kl.sum().backward()
    assert (kl > 100).all() and kl.isfinite().all() and hidden.grad.isfinite().all()


def peak_of_training(num_rows: int, chunk_size: int) -> int:
    hidden, weight, *reference = case(num_rows, 8, VOCABULARY, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    plan = RowPlan.make(np.arange(num_rows), num_rows, chunk_size, CPU)
    tokens = TokenBatch(torch.ones(num_rows), torch.tensor(num_rows), torch.ones(num_rows))
    targets = torch.zeros(num_rows, dtype=torch.int64)

    def work():
        kept = KLReference(reference[0], reference[1])
        fused_dapo_head(hidden, targets, plan, tokens, LOSS, Head(weight), reference=kept).loss_sum.backward()

    return peak_bytes(work)


VOCABULARY = 16384


@pytest.mark.parametrize("switch", ["actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"])
@pytest.mark.parametrize(("parallel", "share"), [("", 1), ("tensor_model_parallel_size=2 sequence_parallel=true", 2)])
def test_the_plan_says_how_many_hidden_states_are_kept(switch, parallel, share):
    chosen = {
        "actor_rollout_ref.actor.use_kl_loss": ["kl_loss_coef=0.1", "kl_loss_type=full"],
        "algorithm.use_kl_in_reward": ["kl_ctrl.kl_coef=0.1", "kl_penalty=full"],
    }[switch]
    megatron = [f"actor_rollout_ref.actor.megatron.{setting}" for setting in parallel.split()]
    sizes = ["data.train_batch_size=8", "data.max_response_length=100", "actor_rollout_ref.rollout.n=4"]
    others = [f"{switch.rpartition('.')[0]}.{setting}" for setting in chosen]
    base = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    base += [f"trainer.n_procs_per_node={share}", *sizes, *megatron]
    assert "whole vocabulary" not in process_plan(load_config(None, base))
    plan = process_plan(load_config(None, [*base, f"{switch}=true", *others]))
    assert f"up to {8 * 4 * 100 // share} tokens x hidden size" in plan


def test_a_reference_of_another_vocabulary_is_refused():
    prepare_megatron()
    from megatron_dapo.training import reference

    small, large = SimpleNamespace(vocab_size=5), SimpleNamespace(vocab_size=6)
    reference.check_vocabulary(small, small)
    with pytest.raises(UserError, match="vocabulary of 6, the actor one of 5.*give a reference"):
        reference.check_vocabulary(large, small)


def test_it_holds_two_chunks_of_logits_and_nothing_of_the_size_of_all():
    chunk = 32 * VOCABULARY * 4
    few, many = peak_of_training(256, 32), peak_of_training(512, 32)
    # two buffers per model; the weight's gradient, a quarter of one, while it is handed over; some
    # numbers per row
    assert few < 5.5 * chunk
    assert many - few < 256 * 1024, "grows with the rows by more than a kilobyte each"
