"""What a sharded optimizer's checkpoint is made of, a flat range of a tensor as boxes, and the schedule beside it."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.checkpointing.torch_dist.loading import OptimizerParamScheduler, restore_schedule
from megatron_dapo.checkpointing.torch_dist.pieces import Box, rectangles

pytestmark = pytest.mark.unit

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(0, size))
    whole = torch.arange(size).view(shape)
    found = []
    for offset, box in rectangles(shape, start, end):
        assert all(length > 0 for length in box)
        window = tuple(slice(o, o + length) for o, length in zip(offset, box, strict=True))
        assert whole[window].shape == box
        found += whole[window].flatten().tolist()
    assert found == list(range(start, end))


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_a_range_of_a_matrix_needs_three_boxes_at_most(rows, columns, data):
    start, end = sorted(data.draw(st.tuples(st.integers(0, rows * columns), st.integers(0, rows * columns))))
    assert len(list(rectangles((rows, columns), start, end))) <= 3


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_slices_of_all_ranks_make_up_the_whole_tensor(num_ranks, rows, data):
    """A parameter of `num_ranks * rows` x 3, one block of rows per tensor-parallel rank, each cut anywhere in two."""
    whole = torch.arange(num_ranks * rows * 3).view(-1, 3)
    made = torch.full_like(whole, -1)
    for rank in range(num_ranks):
        flat = whole[rank * rows : (rank + 1) * rows].flatten()
        box = Box("w", tuple(whole.shape), (rank * rows, 0), (rows, 3), 0, (0, 0))
        cut = data.draw(st.integers(0, flat.numel()))
        for first, values in ((0, flat[:cut]), (cut, flat[cut:])):
            for piece in box.pieces(values, first, replica=0):
                assert piece.key == "w" and piece.global_shape == tuple(whole.shape)
                assert (made[piece.global_slice()] == -1).all()
                made[piece.global_slice()] = piece.data
    assert torch.equal(made, whole)


def test_what_lies_outside_of_a_box_is_left_out():
    """The gate and the up projection lie one behind the other in one parameter."""
    values = torch.arange(8.0)  # elements 2 to 9 of a parameter of 12
    gate = Box("gate", (2, 3), (0, 0), (2, 3), 0, (0, 0))
    up = Box("up", (2, 3), (0, 0), (2, 3), 6, (0, 0))
    assert torch.cat([p.data.flatten() for p in gate.pieces(values, 2, 0)]).tolist() == [0, 1, 2, 3]
    assert torch.cat([p.data.flatten() for p in up.pieces(values, 2, 0)]).tolist() == [4, 5, 6, 7]


def schedule_of(style: str, num_steps: int, lr: float = 1e-6) -> OptimizerParamScheduler:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.1}])
    return OptimizerParamScheduler(optimizer, 0.0, lr, 0.0, 2, num_steps, style, 0.1, 0.1, 0, "constant")


@pytest.mark.parametrize(
    ("style", "lr", "words"),
    [("constant", 1e-6, ""), ("constant", 2e-6, "max_lr"), ("cosine", 1e-6, "lr_decay_steps was 100, is 500")],
)
def test_of_a_schedule_what_differs_and_is_read_is_reported(style, lr, words):
    """A constant learning rate does not depend on the length of the run."""
    before, now = schedule_of(style, 100), schedule_of(style, 500, lr)
    before.step(increment=7)
    notes = restore_schedule(now, before.state_dict())
    assert now.num_steps == 7 and bool(notes) == bool(words)
    assert all(words in note and ("lr_decay_steps" in note) == (style == "cosine") for note in notes)
