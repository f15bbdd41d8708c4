"""The garbage collector is paused while objects are made that stay, and runs again afterwards."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.common.garbage import collection_paused
from megatron_dapo.data.flat_pickle import flat_pickle, from_flat_pickle
from megatron_dapo.training.distribute import StepDistributor

pytestmark = pytest.mark.unit

NUM_OBJECTS = 3000  # more than the collector lets be made without a look at them


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that were looked through since the test began."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)


def made() -> list[list]:
    return [[] for _ in range(NUM_OBJECTS)]


def test_nothing_is_looked_through_while_a_block_makes_objects(collections):
    with collection_paused():
        kept = made()
        assert collections == []
    kept += made()
    assert collections != []


def test_a_pause_ends_with_the_outer_one_and_with_an_error():
    with collection_paused():
        with pytest.raises(KeyError), collection_paused():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_step_is_unpickled_without_a_look_at_its_objects(collections):
    flat = flat_pickle(made())
    collections.clear()
    assert len(from_flat_pickle(flat)) == NUM_OBJECTS
    assert len(collections) <= 1  # when all is made


def test_a_step_is_cut_and_collated_without_a_look_at_its_objects():
    seen = []
    agreement = SimpleNamespace(each=lambda *_: seen.append(gc.isenabled()))
    layout = SimpleNamespace(agreement=agreement, hand_out=lambda _: flat_pickle(([], [], {}, 0)))
    distributor = SimpleNamespace(
        _layout=layout, _parts=None, _experts=None, _collated=lambda _: seen.append(gc.isenabled())
    )
    StepDistributor.__call__(distributor, 1, None)  # type: ignore[arg-type]
    assert seen == [False] * 3 and gc.isenabled()
