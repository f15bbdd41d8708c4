"""What `make test` leaves to `make proofs`, and what it keeps."""

import pytest

from tests.distributed import test_layouts, test_parity
from tests.distributed.layout_runs import cases_of
from tests.proofs import covering

pytestmark = pytest.mark.unit

ALL = {
    "dense": cases_of(
        test_layouts.by_world_size(test_layouts.LAYOUTS, test_layouts.WORLD_SIZES, test_layouts.variants)
    ),
    "shared mixture": cases_of(test_layouts.SHARED_LAYOUTS),
    "parity": test_parity.PAIRS,
}


def parts(case: str) -> tuple[str, list[str]]:
    layout, *variant = case.split("/")
    return layout, variant


@pytest.mark.parametrize("name", ALL)
def test_each_variant_still_meets_each_kind_of_parallelism_that_it_met(name):
    def met(cases):
        split = [parts(case) for case in cases if not case.startswith("tp1/")]
        return {
            (kind.strip("0123456789"), part)
            for layout, variant in split
            for kind in layout.split("_")
            for part in variant
        }

    kept = covering(ALL[name])
    assert set(kept) <= set(ALL[name]) and len(kept) == len(set(kept))
    assert met(kept) == met(ALL[name])


@pytest.mark.parametrize("name", ALL)
def test_each_layout_keeps_a_case_and_one_process_keeps_all(name):
    kept = covering(ALL[name])
    assert {parts(case)[0] for case in kept} == {parts(case)[0] for case in ALL[name]}
    assert {case for case in ALL[name] if case.startswith("tp1/")} <= set(kept)


def test_much_of_the_dense_cases_is_left_to_the_proofs(monkeypatch):
    assert len(covering(ALL["dense"])) < 0.6 * len(ALL["dense"])
    monkeypatch.setattr("tests.proofs.PROOFS", True)
    assert covering(ALL["dense"]) == ALL["dense"]
