"""The head's rows: every counted row once, in chunks that fit the buffer,
the same on every rank."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.kernels.row_plan import RowPlan

pytestmark = pytest.mark.unit


class Group:
    """A process group as far as RowPlan asks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


masks = st.integers(1, 12).flatmap(
    lambda rows: st.tuples(
        st.sampled_from([1, 2, 4]), st.lists(st.booleans(), min_size=4 * rows, max_size=4 * rows), st.integers(1, 50)
    )
)


@given(masks)
def test_chunks_together_hold_every_counted_row_once_and_gather_to_it(case):
    size, mask, chunk_size = case
    counted = np.flatnonzero(mask)
    slices = torch.arange(len(mask)).chunk(size)  # a row's number stands for its hidden states
    plans = [
        RowPlan.make(counted, len(mask), chunk_size, torch.device("cpu"), Group(rank, size) if size > 1 else None)
        for rank in range(size)
    ]
    gathered = torch.full((len(counted),), -1)
    for chunks in zip(*(plan.chunks for plan in plans), strict=True):
        sent = [
            torch.nn.functional.pad(slices[rank][chunk.local], (0, chunk.width - len(chunk.local)), value=-7)
            for rank, chunk in enumerate(chunks)
        ]
        for chunk in chunks:
            rows = torch.cat(sent) if chunk.kept is None else torch.cat(sent)[chunk.kept]
            assert len(rows) == chunk.num_rows <= max(chunk_size, size)
            gathered[chunk.places] = rows
    assert gathered.tolist() == counted.tolist()


@given(masks)
def test_a_chunk_is_full_wherever_enough_rows_are_left(case):
    """Even with all of them in one slice: the chunks that the rows need,
    and few more at the seams."""
    size, mask, chunk_size = case
    counted = np.flatnonzero(mask)
    group = Group(0, size) if size > 1 else None
    plan = RowPlan.make(counted, len(mask), chunk_size, torch.device("cpu"), group)
    if size == 1:
        assert len(plan.chunks) == -(-len(counted) // chunk_size)
    # between two chunks that are not full, at least one slice ran out
    not_full = sum(chunk.num_rows <= chunk_size - size for chunk in plan.chunks)
    assert not_full <= size


def test_an_empty_mask_gives_no_chunk():
    plan = RowPlan.make(np.zeros(0, dtype=np.int64), 8, 4, torch.device("cpu"), Group(0, 2))
    assert plan.chunks == () and plan.num_counted == 0
