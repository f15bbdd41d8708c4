"""The heads at real sizes, bf16, against float64: values, gradients, bits,
and no wait for the device."""

import pytest
import torch

from megatron_dapo.kernels.logits_chunk import runs_on_triton
from tests import kernel_checks as checks
from tests.full_kl_checks import check_full_kl

pytestmark = pytest.mark.gpu

SHAPES = {
    "0.5b": dict(rows=4096, hidden=896, vocab=151936, chunk_size=2048),
    "7b": dict(rows=4096, hidden=3584, vocab=152064, chunk_size=4096),
    "32b_tp8": dict(rows=12288, hidden=5120, vocab=19008, chunk_size=4096),
    # nothing divides anything: a ragged last tile, padding columns, a last chunk of few rows
    "odd": dict(rows=1501, hidden=1032, vocab=19003, padding=21, chunk_size=500),
}


@pytest.fixture(scope="module", params=SHAPES)
def case(request, device):
    yield checks.HeadCase.make(device, **SHAPES[request.param])
    torch.cuda.empty_cache()


def test_a_gpu_takes_the_triton_kernels(device):
    assert runs_on_triton(torch.zeros(1, device=device))


def test_log_probs_and_entropy_are_those_of_float64(case):
    checks.check_values(case)


def test_composed_gradients_are_those_of_float64(case):
    checks.check_composed_gradients(case)


def test_the_fused_head_is_dapo_loss_on_float64_log_probs(case):
    checks.check_fused_head(case)


def test_the_fused_head_is_the_composed_one(case):
    checks.check_fused_is_composed(case)


def test_the_kl_over_the_whole_vocabulary_and_its_gradient_are_those_of_float64(case):
    check_full_kl(case)


def test_two_runs_give_equal_bits(case):
    checks.check_run_to_run(case)


def test_a_log_prob_does_not_depend_on_its_company(case):
    checks.check_batch_invariance(case)


def test_the_loss_path_never_waits_for_the_device(case):
    checks.check_no_host_sync(case)


@pytest.mark.parametrize("rows", [8192, 32768])
def test_memory_is_one_chunk_however_many_rows(device, rows):
    checks.check_memory(checks.HeadCase.make(device, **SHAPES["32b_tp8"] | dict(rows=rows)))


def test_the_torch_backend_agrees_on_a_gpu(device):
    case = checks.HeadCase.make(device, rows=700, hidden=512, vocab=8003, padding=5, chunk_size=256)
    checks.check_values(case, use_triton=False)
    checks.check_fused_head(case, use_triton=False)


def test_reading_a_value_would_be_noticed(device):
    with checks.forbidding_host_syncs(device), pytest.raises(RuntimeError):
        torch.ones(1, device=device).item()
