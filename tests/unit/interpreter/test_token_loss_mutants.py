"""Promise of the tests of the loss kernel: a changed comparison, sign or extremum is noticed. All: `make mutation`."""

import pytest

from tests.mutation.loss_targets import TARGETS

pytestmark = pytest.mark.unit


IN_THE_KERNEL = ("token_loss_kernel:", "_clamped:", "_clipped:", "_shaped:", "_kl:", "_largest:")
SHARES = 6


@pytest.mark.parametrize("share", range(SHARES))
def test_every_change_of_a_comparison_sign_or_extremum_is_noticed(tmp_path, share):
    target = TARGETS[-1]
    mutants = [
        mutant
        for mutant in target.mutants(tmp_path)
        if mutant.kind != "other" and mutant.name.startswith(IN_THE_KERNEL)
    ]
    assert len(mutants) > 50
    mutants = mutants[share::SHARES]
    unnoticed = [
        mutant.name
        for mutant in mutants
        if mutant.name not in target.equivalent
        and not mutant.name.startswith(target.beyond)
        and target.survives_quick(mutant, tmp_path)
    ]
    assert not unnoticed
