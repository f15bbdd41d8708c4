"""The tests of the loss kernel notice a changed comparison, sign or extremum.
All: `make mutation`."""

import functools
import tempfile
from pathlib import Path

import pytest

from tests.mutation.loss_targets import TARGETS
from tests.mutation.mutants import Mutant
from tests.proofs import few

pytestmark = pytest.mark.unit

TARGET = TARGETS[-1]
IN_THE_KERNEL = ("token_loss_kernel:", "_clamped:", "_bounded:", "_clipped:", "_shaped:", "_kl:", "_put_largest:")
SHARES = 6


@functools.cache
def chosen_mutants() -> list[Mutant]:
    """Once for all shares: no fixture, because the interpreter exists only within tests."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [
            mutant
            for mutant in TARGET.mutants(Path(folder))
            if mutant.kind != "other" and mutant.name.startswith(IN_THE_KERNEL)
        ]
    assert len(chosen) > 50
    return chosen


@pytest.mark.parametrize("share", few(range(SHARES), 1))
def test_every_change_of_a_comparison_sign_or_extremum_is_noticed(tmp_path, share):
    unnoticed = [
        mutant.name
        for mutant in chosen_mutants()[share::SHARES]
        if mutant.name not in TARGET.equivalent
        and not mutant.name.startswith(TARGET.beyond)
        and TARGET.survives_quick(mutant, tmp_path)
    ]
    assert not unnoticed
