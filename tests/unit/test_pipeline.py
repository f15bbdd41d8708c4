"""Any number of layers goes evenly over any pipeline; model, memory and time agree on them."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_dapo.commands.plan.process_plan import memory_lines
from megatron_dapo.commands.plan.training_time import (
    Efficiency,
    TrainerLayout,
    TrainingWork,
    training_time,
)
from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.memory import activation_bytes, model_states, num_parameters
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.pipeline import PipelineSplit, pipeline_split, split_of
from megatron_dapo.estimates.recompute import recomputed_share
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.models.megatron_settings import megatron_layout
from tests.config_overrides import TP8_PP2
from tests.unit.test_plan_time import HALF, SLOW, SMALL, THREE_TOKENS

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"
DENSE = model_spec(model_json_named("qwen2.5-32b"))  # 64 layers
pipelines = st.tuples(st.integers(1, 130), st.integers(1, 16), st.integers(1, 6))


@given(pipelines)
def test_every_layer_is_in_one_chunk_and_chunks_follow_one_another(pipeline):
    num_layers, num_stages, chunks_per_stage = pipeline
    split = pipeline_split(num_layers, num_stages, chunks_per_stage)
    chunks = range(num_stages * chunks_per_stage)
    assert [layer for chunk in chunks for layer in split.numbers(chunk)] == list(range(num_layers))
    assert [split.chunks_of(chunk % num_stages)[chunk // num_stages] for chunk in chunks] == list(split.layers)
    assert sum(map(split.layers_of, range(num_stages))) == num_layers


@given(pipelines)
def test_layers_that_divide_are_cut_into_equal_chunks(pipeline):
    factor, num_stages, chunks_per_stage = pipeline
    num_chunks = num_stages * chunks_per_stage
    split = pipeline_split(factor * num_chunks, num_stages, chunks_per_stage)
    assert split.layers == (factor,) * num_chunks and split.is_even


@given(pipelines)
def test_a_chunk_is_idle_only_where_there_are_more_chunks_than_layers_with_embedding_and_head(pipeline):
    num_layers, num_stages, chunks_per_stage = pipeline
    split = pipeline_split(num_layers, num_stages, chunks_per_stage)
    assert split.has_idle_chunk == (num_layers + 2 < len(split.layers))


@given(pipelines)
def test_stages_and_the_chunks_of_one_differ_by_one_layer_at_most(pipeline):
    split = pipeline_split(*pipeline)
    stages = range(split.num_stages)
    parts = [[split.layers_of(stage) for stage in stages], *(split.chunks_of(stage) for stage in stages)]
    assert all(max(part) - min(part) <= 1 for part in parts)
    assert [split.layers_of(stage) for stage in stages] == list(pipeline_split(*pipeline[:2], 1).layers)


@given(st.integers(1, 9), st.integers(2, 4))
def test_no_other_split_has_a_smaller_largest_stage_with_embedding_and_head(num_layers, num_stages):
    """Of all splits there are."""

    def largest(layers: tuple[int, ...]) -> int:
        return max(number + (stage == 0) + (stage == num_stages - 1) for stage, number in enumerate(layers))

    every = (layers for layers in product(range(num_layers + 1), repeat=num_stages) if sum(layers) == num_layers)
    assert largest(pipeline_split(num_layers, num_stages, 1).layers) == min(map(largest, every))


@given(st.integers(2, 16), st.integers(1, 6), st.integers(2, 12))
def test_where_embedding_and_head_make_it_divide_it_is_the_split_of_megatron_that_accounts_for_them(pp, vpp, share):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    num_layers = share * pp * vpp - 2
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    stages = [[get_num_layers_to_build(config, chunk, stage) for chunk in range(vpp)] for stage in range(pp)]
    split = pipeline_split(num_layers, pp, vpp)
    assert [list(split.chunks_of(stage)) for stage in range(pp)] == stages


@given(pipelines)
def test_megatron_is_told_the_split_in_a_layout_that_it_accepts(pipeline):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    num_layers, num_stages, chunks_per_stage = pipeline
    split = pipeline_split(num_layers, num_stages, chunks_per_stage)
    assume(num_stages > 1)
    layout = PipelineParallelLayerLayout(megatron_layout(split), num_stages)
    layout.validate_layer_layout(num_layers, None)
    names = [[[kind.name for kind in chunk] for chunk in stage] for stage in layout.layout]
    assert [[chunk.count("decoder") for chunk in stage] for stage in names] == [
        list(split.chunks_of(stage)) for stage in range(num_stages)
    ]


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "words"),
    [
        (94, 8, 1, "11, 6 x 12, 11"),  # Qwen3-235B-A22B
        (94, 16, 2, "2, 30 x 3, 2"),
        (61, 8, 1, "2 x 7, 5 x 8, 7"),
        (5, 2, 2, "2 x 1, 2, 1"),
        (3, 2, 2, "3 x 1, 0"),  # the last chunk has only the head
        (64, 4, 1, "4 x 16"),
    ],
)
def test_the_layers_of_the_chunks_are_these(num_layers, stages, chunks, words):
    assert str(pipeline_split(num_layers, stages, chunks)) == words


def config_of(*overrides: str):
    return load_config(recipe("dapo_32b"), [*TP8_PP2, *(f"{MEGATRON}.{override}" for override in overrides)])


def test_memory_counts_the_layers_of_each_stage():
    """Weights and activations go with the layers; embedding and head are on the ends,
    as large as each other."""
    sizes = ParallelSizes(tp=8, pp=2, vpp=None, world=64)
    uneven = replace(sizes, pipeline_layers=(40, 24))
    layer = (num_parameters(DENSE, sizes, 0)[0] - DENSE.padded_vocab_size(8) // 8 * DENSE.hidden_size) // 32
    for stage, difference in ((0, 8), (1, -8)):
        half, other = (num_parameters(DENSE, each, stage)[0] for each in (sizes, uneven))
        assert other - half == difference * layer
        states = [model_states(config_of(*keys), DENSE, stage) for keys in ((), ("pipeline_layers=[40, 24]",))]
        assert [each.gradients for each in states] == [4 * half, 4 * other]
    no_layers, half, more = (
        activation_bytes(config_of(f"pipeline_layers={layers}"), DENSE, 0, 10_000)
        for layers in ([0, 64], [32, 32], [40, 24])
    )
    assert (more - no_layers) / (half - no_layers) == pytest.approx(40 / 32, rel=1e-6)


def test_a_stage_keeps_as_much_as_if_all_its_chunks_were_as_large_as_the_largest():
    vpp = "virtual_pipeline_model_parallel_size=2"
    uneven = config_of(vpp, "pipeline_layers=[10,20,16,18]")
    alike = config_of(vpp, "pipeline_layers=[16,16,16,16]")
    assert activation_bytes(uneven, DENSE, 0, 10_000) == activation_bytes(alike, DENSE, 0, 10_000)
    assert split_of(DENSE, ParallelSizes(8, 2, 2, 64, pipeline_layers=(10, 20, 16, 18))).layers_of(0) == 26


def test_first_layers_are_recomputed_in_each_chunk_as_far_as_it_has_them():
    keys = ("recompute_granularity=full", "recompute_method=block", "recompute_num_layers=10", "pipeline_layers=[4,60]")
    assert recomputed_share(config_of(*keys), DENSE) == (4 + 10) / 64


def update_s(layers: tuple[int, ...] | None) -> float:
    """Return the seconds of an update of Qwen2.5-7B;
    its head takes as long as two to three of its 28 layers."""
    sizes = ParallelSizes(tp=4, pp=2, vpp=None, world=16, pipeline_layers=layers)
    layout = TrainerLayout(sizes, 8, sequence_parallel=True, recompute=0.0, max_tokens=22528)
    work = TrainingWork(8192, Lengths.with_mean(6000, 0.9, 20480), 170, mini_batches=16)
    spec = model_spec(model_json_named("qwen2.5-7b"))
    return training_time(spec, layout, work, HARDWARE["h100"], Efficiency()).update


def test_the_slowest_stage_decides_how_long_an_update_takes():
    """A layer moved from the head's stage to the other shortens an update. Each further one
    lengthens it, as much as a layer moved the other way: one stage or the other has a layer
    more."""
    updates = [update_s((14 + more, 14 - more)) for more in range(-2, 5)]
    assert updates.index(min(updates)) == 3
    steps = [later - earlier for earlier, later in pairwise(updates)]
    assert steps[4:] == [pytest.approx(steps[-1], rel=0.01)] * 2
    assert steps[:2] == [pytest.approx(-steps[-1], rel=0.01)] * 2
    assert update_s(None) == updates[2]


def test_by_hand_a_stage_with_all_layers_and_no_head_is_as_slow_as_its_layers():
    """SMALL's two layers on the first stage, only the head on the second. Of `test_plan_time`'s
    numbers by hand: the layers' (0.9856 + 0.5248), and the weights of both layers and the
    embedding, 1440 parameters."""
    sizes = ParallelSizes(1, 2, None, 2, pipeline_layers=(2, 0))
    layout = TrainerLayout(sizes, 8, False, 0.0, max_tokens=64)
    time = training_time(SMALL, layout, TrainingWork(1, THREE_TOKENS, 1, mini_batches=1), SLOW, HALF)
    layers, weights = 0.9856 + 0.5248, 2 * 1440 / 1e4
    # one micro-batch, and one more is waited for
    assert time.score == pytest.approx((layers + weights) * 2)
    worked = 3 * layers + weights + 1440 * (2 + 8) / 1e4
    assert time.bubble == pytest.approx(worked)
    assert time.update == pytest.approx(2 * worked + 1440 * 30 / 1e4)


def test_the_plan_shows_the_layers_of_uneven_chunks_and_only_theirs():
    lines = [list(memory_lines(config_of(*keys), (DENSE, None))) for keys in ((), ("pipeline_layers=[34,30]",))]
    assert "layers of the 2 pipeline chunks: 34, 30" in lines[1]
    assert len(lines[1]) == len(lines[0]) + 1


def test_megatrons_own_layout_string_is_a_list_of_layers():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    assert (
        PipelineParallelLayerLayout("Et|tt|tt|L", 4).layout
        == PipelineParallelLayerLayout(megatron_layout(pipeline_split(5, 4, 1, [1, 2, 2, 0])), 4).layout
    )


def test_a_split_that_is_given_is_taken_as_it_is():
    assert pipeline_split(6, 2, 2, [0, 3, 3, 0]) == PipelineSplit(2, (0, 3, 3, 0))
