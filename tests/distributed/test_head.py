"""The training head over tensor-parallel ranks equals float64 torch on one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.forked_ranks import run_ranks
from tests.head_cases import CASES, SAME_ROWS, bounds, full_kl_of, inputs_of, log_probs_of, oracle
from tests.proofs import few

pytestmark = pytest.mark.distributed

WORLDS = few((1, 2, 4), 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict]:
    """world size -> {"case/way": one answer per rank}."""
    by_world = {}
    for world in WORLDS:
        out = tmp_path_factory.mktemp("head") / f"{world}.pt"
        run_ranks(Path(__file__).with_name("head_worker.py"), world, str(out))
        by_world[world] = torch.load(out, weights_only=False)
    return by_world


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.norm().item()
    return (ours.double() - expected).norm().item() / norm if norm else ours.double().norm().item()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", ["tp", "sp", "tied_tp", "tied_sp"])
@pytest.mark.parametrize("name", CASES)
def test_loss_log_probs_and_gradients_are_those_of_float64_torch(results, world, way, name):
    case, expected = CASES[name], oracle(CASES[name])
    value_bound, hidden_bound, weight_bound = bounds(case)
    for got in results[world][f"{name}/{way}"]:
        for values, truth in [(got["log_probs"], expected.log_probs), (got["plain"], expected.log_probs)]:
            torch.testing.assert_close(values.double(), truth, rtol=0, atol=value_bound)
        if case.entropy:
            # not with the offset: differences to the maximum are taken before anything is added
            torch.testing.assert_close(
                got["entropy"].double(), expected.entropy, rtol=0, atol=min(2e-4, 4 * value_bound)
            )
        if case.full_kl:  # a sum of differences of log-probs, here below 20
            torch.testing.assert_close(got["kl"].double(), expected.kl, rtol=4 * value_bound, atol=4 * value_bound)
        assert (got["log_probs"] <= 0).all()
        # a token's loss moves with its log-prob by up to |A| r, here below 10
        slack = 10 * value_bound * max(1, len(expected.log_probs))
        torch.testing.assert_close(got["loss_sum"].double(), expected.loss_sum, rtol=1e-6, atol=slack)
        grad_weight = expected.grad_weight.clone()
        if (
            way.startswith("tied") and case.rows
        ):  # the embedding's own gradient: ones in each rank's first row, every micro-batch
            grad_weight[:: case.vocab // world] += case.num_micro_batches
        assert relative(got["grad_hidden"], expected.grad_hidden) <= hidden_bound
        assert relative(got["grad_weight"], grad_weight) <= weight_bound


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_and_repetitions_give_equal_bits(results, world, name):
    for way in ("tp", "sp"):
        ranks, again = results[world][f"{name}/{way}"], results[world][f"{name}/{way}/again"]
        for got in (*ranks, *again):
            for key, values in ranks[0].items():
                if CASES[name].entropy or key != "entropy":
                    assert values is got[key] is None or torch.equal(got[key], values), key
        assert torch.equal(ranks[0]["plain"], ranks[0]["log_probs"]), "a first step's ratio would not be exactly 1"


@pytest.mark.parametrize("world", WORLDS)
def test_log_probs_do_not_depend_on_how_rows_were_cut(results, world):
    """One chunk, chunks of one, sequence parallelism or none: the same bits for the same rows."""
    answers = [results[world][f"{name}/{way}"][0]["plain"] for name in SAME_ROWS for way in ("tp", "sp")]
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows])
def test_the_composed_head_is_float64_torch_too(results, world, name):
    case, inputs = CASES[name], inputs_of(CASES[name])
    hidden = inputs.hidden_LH.double()[torch.from_numpy(inputs.counted)].requires_grad_()
    weight = inputs.weight_VH.double().requires_grad_()
    everything = torch.arange(len(inputs.counted)).numpy()
    counted_reference = inputs.ref_hidden_LH[torch.from_numpy(inputs.counted)]
    log_probs, entropy = log_probs_of(hidden, weight, case, everything, inputs.targets, inputs.temperature)
    kl = full_kl_of(hidden, weight, case, replace(inputs, counted=everything, ref_hidden_LH=counted_reference))
    (log_probs.sum() + 0.5 * entropy.sum() + (0.3 * kl.sum() if case.full_kl else 0.0)).backward()
    value_bound, hidden_bound, weight_bound = bounds(case)
    for got in results[world][f"{name}/composed"]:
        torch.testing.assert_close(got["log_probs"].double(), log_probs.detach(), rtol=0, atol=value_bound)
        if case.full_kl:
            torch.testing.assert_close(got["kl"].double(), kl.detach(), rtol=4 * value_bound, atol=4 * value_bound)
        assert relative(got["grad_hidden"], hidden.grad) <= hidden_bound
        assert relative(got["grad_weight"], weight.grad) <= weight_bound
