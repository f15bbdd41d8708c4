"""The tests of the loss: plain arithmetic notices every change in it.
All of it: `make mutation`."""

import importlib.util
import os
import sys

import pytest

from tests.mutation.loss_targets import TARGETS, spec_of

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


def test_a_mutant_is_not_taken_for_the_one_before_it_which_was_as_long(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    values = []
    for value in (4, 5):
        path = tmp_path / "mutant.py"
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (0, 0))  # within the same second
        spec = spec_of("mutant", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        values.append(module.VALUE)
    assert values == [4, 5]
