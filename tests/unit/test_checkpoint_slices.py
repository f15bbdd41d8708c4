"""Rectangles of a flat range of a tensor, for a sharded optimizer's checkpoint;
and the schedule."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.checkpointing.torch_dist.loading import OptimizerParamScheduler, restore_schedule
from megatron_dapo.checkpointing.torch_dist.slices import Region, model_regions, rectangles
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import build_model
from megatron_dapo.platform.parallel import ParallelLayout
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def window(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


@given(SHAPES, st.data())
def test_rectangles_of_a_range_are_its_elements_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(0, size))
    whole = torch.arange(size).view(shape)
    elements = []
    for offset, size in rectangles(shape, start, end):
        assert all(length > 0 for length in size)
        part = whole[window(offset, size)]
        assert part.shape == size
        elements += part.flatten().tolist()
    assert elements == list(range(start, end))


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_a_range_of_a_matrix_needs_three_rectangles_at_most(rows, columns, data):
    start, end = sorted(data.draw(st.tuples(st.integers(0, rows * columns), st.integers(0, rows * columns))))
    assert len(list(rectangles((rows, columns), start, end))) <= 3


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_slices_of_all_ranks_make_up_the_whole_tensor(num_ranks, rows, data):
    """A parameter of `num_ranks * rows` x 3, one block of rows per tensor-parallel rank, each cut
    anywhere in two."""
    whole = torch.arange(num_ranks * rows * 3).view(-1, 3)
    made = torch.full_like(whole, -1)
    for rank in range(num_ranks):
        flat = whole[rank * rows : (rank + 1) * rows].flatten()
        region = Region("w", tuple(whole.shape), (rank * rows, 0), (rows, 3), 0, (0, 0))
        cut = data.draw(st.integers(0, flat.numel()))
        for first, values in ((0, flat[:cut]), (cut, flat[cut:])):
            for each in region.slices(values, first, replica=0):
                assert each.name == "w" and each.whole_shape == tuple(whole.shape) and each.is_written
                target = made[window(each.offset, each.values.shape)]
                assert (target == -1).all()
                target.copy_(each.values)
    assert torch.equal(made, whole)


def test_what_lies_outside_of_a_region_is_left_out():
    """The gate and the up projection lie one behind the other in one parameter."""
    values = torch.arange(8.0)  # elements 2 to 9 of a parameter of 12
    gate = Region("gate", (2, 3), (0, 0), (2, 3), 0, (0, 0))
    up = Region("up", (2, 3), (0, 0), (2, 3), 6, (0, 0))
    assert torch.cat([s.values.flatten() for s in gate.slices(values, 2, 0)]).tolist() == [0, 1, 2, 3]
    assert torch.cat([s.values.flatten() for s in up.slices(values, 2, 0)]).tolist() == [4, 5, 6, 7]


DENSE = {"linear_fc1.weight_w": (32, 16), "linear_fc1.weight_v": (32, 16), "linear_fc2.weight": (16, 32)}
EXPERT = {"linear_fc1.weight_w": (8, 16), "linear_fc1.weight_v": (8, 16), "linear_fc2.weight": (16, 8)}
STORED = {
    "qwen2": {"self_attention.linear_qkv.bias": (48,), **{f"mlp.{name}": shape for name, shape in DENSE.items()}},
    "qwen3_moe": {
        "self_attention.q_layernorm.weight": (8,),
        "self_attention.k_layernorm.weight": (8,),
        "mlp.router.weight": (2, 16),
        **{f"mlp.experts.experts.{e}.{name}": shape for e in (0, 1) for name, shape in EXPERT.items()},
    },
}
"""Family -> names and shapes of a layer's tensors in a checkpoint, beside those of every layer."""


@pytest.mark.parametrize("family", STORED)
def test_a_checkpoint_has_the_same_names_and_shapes_with_every_megatron(family, tmp_path):
    """As versions before stored them: a checkpoint of one Megatron-core is loaded with another."""
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (16,),
        "self_attention.linear_qkv.weight": (48, 16),
        "self_attention.linear_proj.weight": (16, 16),
        "mlp.linear_fc1.layer_norm_weight": (16,),
        **STORED[family],
    }
    whole = {
        "embedding.word_embeddings.weight": (64, 16),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (64, 16),
        **{f"decoder.layers.0.{name}": shape for name, shape in layer.items()},
    }
    spec = read_model_spec(make_tiny(tmp_path, family, layers=1, hidden=16, heads=2, num_experts=2))
    layout = ParallelLayout.initialize()
    try:
        regions = model_regions(build_model(spec, layout, MegatronConfig()), layout)
    finally:
        ParallelLayout.shutdown()
    assert {region.name: region.whole_shape for of_one in regions.values() for region in of_one} == whole


def schedule_of(style: str, num_steps: int, lr: float = 1e-6) -> OptimizerParamScheduler:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.1}])
    return OptimizerParamScheduler(optimizer, 0.0, lr, 0.0, 2, num_steps, style, 0.1, 0.1, 0, "constant")


@pytest.mark.parametrize(
    ("style", "lr", "words"),
    [("constant", 1e-6, ""), ("constant", 2e-6, "max_lr"), ("cosine", 1e-6, "lr_decay_steps was 100, is 500")],
)
def test_the_differences_of_a_schedule_that_matter_are_reported(style, lr, words):
    """A constant learning rate does not depend on the length of the run."""
    before, now = schedule_of(style, 100), schedule_of(style, 500, lr)
    before.step(increment=7)
    notes = restore_schedule(now, before.state_dict())
    assert now.num_steps == 7 and bool(notes) == bool(words)
    assert all(words in note and ("lr_decay_steps" in note) == (style == "cosine") for note in notes)
