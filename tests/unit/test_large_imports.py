"""The garbage collector leaves large imports in peace, then and later; nothing else."""

import gc

import pytest

from megatron_dapo.common.large_imports import large_imports

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_imported_is_not_looked_through():
    before = gc.get_freeze_count()
    with large_imports():
        assert not gc.isenabled()
        module = {"name": []}
    assert gc.isenabled() and gc.get_freeze_count() > before
    assert not any(each is module for each in gc.get_objects())
    made_later = [module]
    assert any(each is made_later for each in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on_and_nothing_frozen():
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), large_imports():
        raise ImportError("no such module")
    assert gc.isenabled() and gc.get_freeze_count() == before
