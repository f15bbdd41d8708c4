"""Log-prob and entropy from given logits against float64 log_softmax; what backward in place promises and refuses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dapo.kernels import from_logits, statistics
from megatron_dapo.kernels.from_logits import logprob_entropy_from_logits, row_statistics

pytestmark = pytest.mark.unit

EPS = torch.finfo(torch.float32).eps


def oracle(logits, targets, temperature=1.0):
    """float64 log-prob and entropy; -inf logits have no share in the entropy."""
    temperature = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1)
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -torch.where(log_p == float("-inf"), 0.0, log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def case(n=37, v=53, dtype=torch.float64, offset=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, v, generator=g, dtype=torch.float64) * 4 + offset
    return logits.to(dtype), torch.randint(0, v, (n,), generator=g)


def grads(n, seed=1):
    return torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[2**22, 100], ids=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(from_logits, "_ELEMENTS_AT_ONCE", request.param)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per row"])
def test_values_and_gradients_equal_float64_log_softmax(inplace, temperature, chunks):
    logits, targets = case()
    if temperature == "per row":
        temperature = 0.5 + torch.rand(len(targets), dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    g_lp, g_h = grads(len(targets))
    lp, h = logprob_entropy_from_logits(ours * 1.0, targets, temperature=temperature, inplace_backward=inplace)
    lp_ref, h_ref = oracle(theirs, targets, temperature)
    (lp @ g_lp + h @ g_h).backward()
    (lp_ref @ g_lp + h_ref @ g_h).backward()
    for a, b in [(lp, lp_ref), (h, h_ref), (ours.grad, theirs.grad)]:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_float32_and_gradients_of_the_logits_dtype(dtype, chunks):
    logits, targets = case(dtype=dtype)
    g_lp, g_h = grads(len(targets))
    x = logits.clone().requires_grad_()
    lp, h = logprob_entropy_from_logits(x, targets)
    assert lp.dtype == h.dtype == torch.float32
    (lp @ g_lp.float() + h @ g_h.float()).backward()
    exact = logits.double().requires_grad_()
    lp_ref, h_ref = oracle(exact, targets)
    (lp_ref @ g_lp + h_ref @ g_h).backward()
    # |x - M| < 64; a gradient is a sum of terms near 1 and is rounded once more to its dtype
    torch.testing.assert_close(lp.double(), lp_ref, rtol=0, atol=64 * EPS)
    torch.testing.assert_close(h.double(), h_ref, rtol=0, atol=64 * EPS)
    assert x.grad.dtype == dtype
    tiny = 6e-8 if dtype == torch.float16 else 0.0  # its smallest number
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=64 * EPS + tiny)


@pytest.mark.parametrize("offset", [-1000.0, -120.0, 1000.0])
def test_a_common_offset_costs_no_more_than_its_own_rounding(offset):
    logits, targets = case(dtype=torch.float32, offset=offset)
    lp, h = logprob_entropy_from_logits(logits, targets, temperature=0.7)
    lp_ref, h_ref = oracle(logits, targets, 0.7)
    bound = 4 * EPS * (abs(offset) / 0.7 + 64)
    torch.testing.assert_close(lp.double(), lp_ref, rtol=0, atol=bound)
    torch.testing.assert_close(h.double(), h_ref, rtol=0, atol=4 * bound)


@pytest.mark.parametrize("want_entropy", [True, False])
def test_gradients_are_those_of_finite_differences(want_entropy):
    logits, targets = case(n=4, v=7)
    targets.clamp_(max=5)

    def outputs(x):
        lp, h = logprob_entropy_from_logits(x, targets, temperature=0.8, want_entropy=want_entropy, num_valid_columns=6)
        return (lp, h) if want_entropy else lp

    assert torch.autograd.gradcheck(outputs, (logits.requires_grad_(),))


def test_columns_that_are_padding_get_no_probability_and_no_gradient():
    logits, targets = case()
    logits[:, 50:] = float("nan")
    targets.clamp_(max=49)
    for inplace in (False, True):
        x = logits.clone().requires_grad_()
        lp, h = logprob_entropy_from_logits(x * 1.0, targets, num_valid_columns=50, inplace_backward=inplace)
        lp_ref, h_ref = oracle(logits[:, :50], targets)
        torch.testing.assert_close((lp, h), (lp_ref, h_ref), rtol=1e-10, atol=1e-10)
        (lp.sum() + h.sum()).backward()
        assert (x.grad[:, 50:] == 0).all() and x.grad.isfinite().all()


def test_logits_of_minus_infinity_have_no_share():
    logits, targets = case()
    logits[:, 20:] = float("-inf")
    targets.clamp_(max=19)
    x = logits.clone().requires_grad_()
    lp, h = logprob_entropy_from_logits(x, targets)
    torch.testing.assert_close((lp, h), oracle(logits, targets), rtol=1e-10, atol=1e-10)
    (lp.sum() + h.sum()).backward()
    assert (x.grad[:, 20:] == 0).all() and x.grad.isfinite().all()


def test_a_share_of_nothing_but_minus_infinity_has_the_statistics_of_an_empty_one():
    logits, inf = torch.full((2, 5), float("-inf")), float("inf")
    for share in (logits, logits[:, :0]):
        stats = row_statistics(share, torch.ones(2), torch.tensor([0, 9]), want_entropy=True)
        assert stats.tolist() == [[-inf, 0.0, 0.0, -inf]] * 2


def test_a_certain_token_has_a_log_prob_of_zero_and_no_gradient():
    logits = torch.full((3, 700), -300.0)
    logits[[0, 1, 2], [0, 600, 699]] = 300.0
    logits.requires_grad_()
    lp, h = logprob_entropy_from_logits(logits, torch.tensor([0, 600, 699]))
    assert (lp == 0).all() and (h == 0).all()
    (lp.sum() + h.sum()).backward()
    assert (logits.grad == 0).all()


def test_a_row_without_incoming_gradient_is_zero_even_if_it_is_not_a_number():
    logits, targets = case(n=3)
    logits[1] = float("nan")
    x = logits.clone().requires_grad_()
    lp, h = logprob_entropy_from_logits(x, targets)
    assert lp[1].isnan() and h[1].isnan()
    weights = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    torch.autograd.backward((lp, h), (weights, weights))
    assert (x.grad[1] == 0).all() and x.grad.isfinite().all() and (x.grad[[0, 2]] != 0).any(1).all()


def test_no_rows_give_empty_results_and_gradients():
    logits, targets = case(n=0)
    lp, h = logprob_entropy_from_logits(logits.requires_grad_(), targets)
    (lp.sum() + h.sum()).backward()
    assert lp.shape == h.shape == (0,) and logits.grad.shape == logits.shape


class OneOfSeveralRanks:
    """A group whose all-gather is answered from what every rank is known to bring."""

    def __init__(self, monkeypatch, rank, stats_RN4):
        self._rank, self._stats = rank, stats_RN4
        monkeypatch.setattr(statistics.dist, "all_gather_into_tensor", self._gather)

    def _gather(self, out, mine, group):
        assert group is self and torch.equal(mine, self._stats[self._rank])
        out.copy_(self._stats.view(out.shape))

    def rank(self):
        return self._rank

    def size(self):
        return len(self._stats)


def test_shares_of_a_vocabulary_give_what_the_whole_gives(monkeypatch):
    """Four ranks of 16 columns, 37 of which exist: one share is cut, the last is nothing but padding."""
    logits, targets = case(v=64)
    targets %= 37
    targets[:4] = torch.tensor([15, 16, 31, 36])
    shares = logits.chunk(4, dim=1)
    inv_temperature = torch.full((len(targets),), 1 / 0.7, dtype=torch.float64)
    stats = torch.stack(
        [
            row_statistics(part[:, : max(0, 37 - 16 * r)], inv_temperature, targets - 16 * r, want_entropy=True)
            for r, part in enumerate(shares)
        ]
    )
    exact = logits[:, :37].clone().requires_grad_()
    lp_ref, h_ref = oracle(exact, targets, 0.7)
    g_lp, g_h = grads(len(targets))
    (lp_ref @ g_lp + h_ref @ g_h).backward()
    expected = torch.nn.functional.pad(exact.grad, (0, 27)).chunk(4, dim=1)
    for rank, part in enumerate(shares):
        group = OneOfSeveralRanks(monkeypatch, rank, stats)
        x = part.clone().requires_grad_()
        lp, h = logprob_entropy_from_logits(x, targets, temperature=0.7, num_valid_columns=37, group=group)
        torch.testing.assert_close((lp, h), (lp_ref, h_ref), rtol=1e-10, atol=1e-10)
        (lp @ g_lp + h @ g_h).backward()
        torch.testing.assert_close(x.grad, expected[rank], rtol=1e-10, atol=1e-10)


def test_in_place_the_gradient_lies_where_the_logits_were():
    logits, targets = case()
    scaled = logits.requires_grad_() * 1.0
    seen = []
    scaled.register_hook(lambda grad: seen.append(grad.data_ptr()))
    lp, _ = logprob_entropy_from_logits(scaled, targets, want_entropy=False, inplace_backward=True)
    lp.sum().backward()
    assert seen == [scaled.data_ptr()]
    torch.testing.assert_close(scaled.detach(), logits.grad, rtol=0, atol=0)


def test_a_leaf_is_not_overwritten():
    logits, targets = case()
    with pytest.raises(ValueError, match="leaf"):
        logprob_entropy_from_logits(logits.requires_grad_(), targets, inplace_backward=True)
    logprob_entropy_from_logits(logits.detach(), targets, inplace_backward=True)  # without gradient nothing is written


def test_rows_that_share_memory_are_not_overwritten():
    logits, targets = case(n=4)
    one = logits[:1].requires_grad_() * 1.0
    with pytest.raises(ValueError, match="overlap"):
        logprob_entropy_from_logits(one.expand(4, -1), targets, inplace_backward=True)


def test_a_second_backward_in_place_is_refused_and_out_of_place_is_not():
    for inplace in (True, False):
        logits, targets = case()
        lp, _ = logprob_entropy_from_logits(logits.requires_grad_() * 1.0, targets, inplace_backward=inplace)
        lp.sum().backward(retain_graph=True)
        once = logits.grad.clone()
        if inplace:
            with pytest.raises(RuntimeError, match="second backward"):
                lp.sum().backward()
        else:
            lp.sum().backward()
            torch.testing.assert_close(logits.grad, 2 * once, rtol=0, atol=0)


def test_logits_changed_after_forward_are_noticed():
    logits, targets = case()
    scaled = logits.requires_grad_() * 1.0
    lp, _ = logprob_entropy_from_logits(scaled, targets, inplace_backward=True)
    scaled.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lp.sum().backward()


def test_who_else_saved_the_logits_is_told_that_they_are_gone():
    logits, targets = case()
    scaled = logits.requires_grad_() * 1.0
    squares = scaled.square().sum()
    lp, _ = logprob_entropy_from_logits(scaled, targets, inplace_backward=True)
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_columns_apart_in_memory_are_refused():
    logits, targets = case()
    with pytest.raises(ValueError, match="adjacent"):
        logprob_entropy_from_logits(logits.t().contiguous().t(), targets)


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_of_the_logits_size_is_made_but_the_gradient_out_of_place(inplace, monkeypatch):
    n, v, rows_at_once = 256, 500, 8
    monkeypatch.setattr(from_logits, "_ELEMENTS_AT_ONCE", rows_at_once * v)
    logits, targets = case(n=n, v=v, dtype=torch.bfloat16)
    logits = logits.requires_grad_() * 1.0
    made = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in args if torch.is_tensor(t)}
            for t in out if isinstance(out, tuple | list) else [out]:
                if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in known:
                    made.append(t.numel())
            return out

    with Record():
        lp, h = logprob_entropy_from_logits(logits, targets, inplace_backward=inplace)
        torch.autograd.grad((lp, h), logits, (torch.ones_like(lp), torch.ones_like(h)))
    big = [size for size in made if size > rows_at_once * v]
    assert big == ([] if inplace else [n * v])
