"""Promise of the tests of the loss: whatever is changed in it, plain arithmetic notices. All of it: `make mutation`."""

import pytest

from tests.mutation.loss_targets import TARGETS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("target", TARGETS[:-1], ids=lambda target: target.module)
def test_every_change_of_the_loss_is_noticed(target, tmp_path):
    mutants = target.mutants(tmp_path)
    assert len(mutants) >= 20
    unnoticed = [
        mutant.name
        for mutant in mutants
        if mutant.name not in target.equivalent
        and not mutant.name.startswith(target.beyond)
        and target.survives_quick(mutant, tmp_path)
    ]
    assert not unnoticed
