"""Token data is arrays from a server's answer to a micro-batch:
no Python object per token is held."""

import gc
import json
import sys
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.data.samples import Group, PartialResponse, Prompt, Sample
from megatron_dapo.data.token_arrays import (
    LOG_PROB,
    MASK,
    TOKEN,
    VERSION,
    has_one_value,
    joined,
    nothing,
    repeated,
    token_array,
)
from megatron_dapo.queue.experience_replay import RecordedGroup
from megatron_dapo.queue.plain_data import draw_from_plain, draw_to_plain, group_from_plain, group_to_plain
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rewards.shaping import unshaped
from megatron_dapo.rollout.sampling import _to_sample
from megatron_dapo.rollout.trajectory import Trajectory
from megatron_dapo.servers.client import Generation, SGLangClient, generation_of
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

PER_TOKEN = {"response_tokens": TOKEN, "rollout_log_probs": LOG_PROB, "loss_mask": MASK, "weight_versions": VERSION}
BYTES_PER_TOKEN = sum(np.dtype(dtype).itemsize for dtype in PER_TOKEN.values())


def answer(length: int) -> bytes:
    """Of a server: ids and log-probs that are objects of their own, half of them of one version,
    half of the next."""
    tokens = range(1000, 1000 + length)
    spans = [
        {"version": "3", "start": 0, "end": length // 2},
        {"version": "4", "start": length // 2, "end": length},
    ]
    meta = {
        "output_token_logprobs": [[-1.0 / token, token, None] for token in tokens],
        "finish_reason": {"type": "stop"},
        "weight_versions": spans,
    }
    return json.dumps({"output_ids": list(tokens), "meta_info": meta}).encode()


def generation(length: int) -> Generation:
    return generation_of(orjson.loads(answer(length)))


def trajectory(length: int) -> Trajectory:
    """Two turns of the model with an environment's words between them."""
    played = Trajectory((1, 2, 3))
    played.add_model_turn(generation(length // 2))
    played.add_environment_turn([5, 6])
    played.add_model_turn(generation(length // 2))
    return played


def sample(length: int) -> Sample:
    return sample_of(trajectory(length))


def sample_of(played: Trajectory) -> Sample:
    return _to_sample("uid", 0, played, RewardResult(1.0, True), unshaped)


def of_trajectory(played: Trajectory) -> Group:
    return Group("uid", Prompt(0, "key", (1, 2, 3), "", "test", ""), (sample_of(played),))


def group(length: int) -> Group:
    return of_trajectory(trajectory(length))


def resumed(length: int) -> Trajectory:
    played = Trajectory((1, 2, 3))
    played.resume(trajectory(length).partial(), length)
    return played


HELD = {
    "the client's answer": generation,
    "a response as it grows": trajectory,
    "the beginning of a response": lambda length: trajectory(length).partial(),
    "a response that goes on": resumed,
    "a group": group,
    "a group as plain data": lambda length: group_to_plain(group(length)),
    "an open group of a saved state": lambda length: draw_from_plain(
        from_bytes(to_bytes(draw_to_plain(replace(group(length), partials=(trajectory(length).partial(),)))))
    ),
    "a state that was saved": lambda length: from_bytes(to_bytes({"kept": [group_to_plain(group(length))]})),
    "a state of lists": lambda length: group_from_plain(
        json.loads(json.dumps(group_to_plain(group(length)), default=np.ndarray.tolist))
    ),
    "experiences": lambda length: RecordedGroup.of(
        replace(group(length), samples=(*group(length).samples, replace(sample(length), correct=False)))
    ),
    "the trainer's samples": lambda length: assemble([group(length)]),
    "a micro-batch": lambda length: collate(assemble([group(length)])),
}


@pytest.mark.parametrize("what", HELD)
def test_no_object_per_token_is_held(what):
    """Python allocates each small object in a block of its own; an array has one at any length."""

    def num_blocks(length: int) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        held = HELD[what](length)
        gc.collect()
        number = sys.getallocatedblocks() - before
        del held
        return number

    num_blocks(100)  # first-time imports and caches
    gc.freeze()  # the collector looks at new objects
    assert num_blocks(8000) - num_blocks(2000) < 600, "of 6000 tokens"


def one_turn(length: int) -> Trajectory:
    """Of the model, by one version."""
    played = Trajectory((1, 2, 3))
    answered = generation(length)
    played.add_model_turn(replace(answered, weight_versions=repeated(3, length, VERSION)))
    return played


@pytest.mark.parametrize(
    ("played", "bytes_per_token"),
    [(trajectory, BYTES_PER_TOKEN), (one_turn, 8)],  # 8: ids and log-probs
)
def test_a_group_costs_what_its_arrays_do(played, bytes_per_token):
    length = 8000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        held = of_trajectory(played(length))
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    (one,) = held.samples
    assert num_bytes <= bytes_per_token * one.num_response_tokens + 16 * 1024


def test_one_version_of_a_whole_answer_is_held_once():
    plain = orjson.loads(answer(4000))
    plain["meta_info"]["weight_versions"] = [{"version": "5", "start": 0, "end": 4000}]
    versions = generation_of(plain).weight_versions
    assert versions.strides == (0,) and versions.dtype == VERSION and versions.tolist() == [5] * 4000


def test_the_collector_hardly_looks_at_an_answer_while_it_is_read():
    """Its lists, one per token, would have it go through all objects again and again."""
    begun = []
    client, body = SGLangClient("http://nowhere"), answer(6000)

    def num_collections(read):
        begun.clear()
        gc.callbacks.append(note)
        try:
            read(body)
        finally:
            gc.callbacks.remove(note)
        return len(begun)

    def note(phase, _):
        begun.extend(["one"] * (phase == "start"))

    gc.collect()
    if sys.version_info < (3, 12):  # later ones wait for the end of a function in C
        assert num_collections(orjson.loads) >= 5  # else this test shows nothing
    gc.collect()
    assert num_collections(partial(client._content, "/generate", 200, "application/json")) <= 1


def test_an_array_has_one_value_where_all_its_values_are_the_same():
    assert has_one_value(repeated(3, 5, VERSION)) and has_one_value(np.full(5, 3))
    assert not has_one_value(np.array([3, 3, 4])) and not has_one_value(repeated(3, 0, VERSION))


def test_what_stands_alone_is_joined_without_a_copy():
    array = np.arange(5, dtype=TOKEN)
    assert joined(TOKEN, nothing(TOKEN), array, ()) is array
    assert joined(TOKEN, array, [7]).tolist() == [0, 1, 2, 3, 4, 7] and joined(TOKEN).dtype == TOKEN


def test_a_repeated_value_stays_one_value_where_a_response_goes_on():
    masks = joined(MASK, repeated(1, 3, MASK), nothing(MASK), repeated(1, 2, MASK))
    assert masks.strides == (0,) and masks.tolist() == [1] * 5 and masks.dtype == MASK
    assert joined(MASK, repeated(1, 3, MASK), repeated(0, 2, MASK)).tolist() == [1, 1, 1, 0, 0]
    assert joined(MASK, repeated(1, 2, MASK), [1, 0]).tolist() == [1, 1, 1, 0]


def test_the_fields_of_a_sample_are_arrays_of_their_dtypes_as_the_server_gave_them():
    one = sample(8)
    assert {name: getattr(one, name).dtype for name in PER_TOKEN} == PER_TOKEN
    assert one.prompt_tokens.dtype == TOKEN and one.prompt_tokens.tolist() == [1, 2, 3]
    assert one.response_tokens.tolist() == [1000, 1001, 1002, 1003, 5, 6, 1000, 1001, 1002, 1003]
    assert one.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1] and one.num_written_tokens == 8
    assert one.weight_versions.tolist() == [3, 3, 4, 4, 4, 4, 3, 3, 4, 4]
    written = [np.float32(-1.0 / token) for token in range(1000, 1004)]
    assert one.rollout_log_probs.tolist() == [*written, 0.0, 0.0, *written]


def test_records_are_equal_where_all_their_values_are():
    one, other = sample(8), sample(8)
    assert one == other and not one != other
    for name in (*PER_TOKEN, "prompt_tokens"):
        values = getattr(one, name).copy()
        values[-1] += 1
        assert one != replace(one, **{name: values}) and one != replace(one, **{name: values[:-1]}), name
    assert one != replace(one, reward=0.5) and one != "a sample"
    assert group(8) == group(8) and group(8) != replace(group(8), samples=())
    assert PartialResponse((1,), (-0.5,), (0,), ("u",)) == PartialResponse([1], [-0.5], [0], ("u",))


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        ((3, 7.5), TOKEN, "number 7.5, no whole number"),
        ((3, True), TOKEN, "number True, no whole number"),
        ((3, "4"), TOKEN, "number '4', no whole number"),
        ((3, 2**31), TOKEN, f"number {2**31}, which int32 cannot hold"),
        ((3, 10**30), TOKEN, f"number {10**30}, which int32 cannot hold"),
        ((1, 256), MASK, "number 256, which uint8 cannot hold"),
        ((1, -1), MASK, "number -1, which uint8 cannot hold"),
        ((-0.5, None), LOG_PROB, "number None, no number"),
        ((-0.5, "nan"), LOG_PROB, "number 'nan', no number"),
    ],
)
def test_what_an_array_cannot_hold_is_refused_and_named(values, dtype, words):
    with pytest.raises(ValueError, match=f"^has the {words}$"):
        token_array(values, dtype, "number")


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), min_size=1, max_size=4))
def test_arrays_hold_the_numbers_of_lists_and_join_in_order(parts):
    arrays = [token_array(part, TOKEN) for part in parts]
    assert [array.tolist() for array in arrays] == parts
    assert joined(TOKEN, *arrays).tolist() == joined(TOKEN, *parts).tolist() == sum(parts, [])
    assert joined(TOKEN, *arrays).dtype == TOKEN and all(token_array(array, TOKEN) is array for array in arrays)
    assert len(nothing(LOG_PROB)) == 0 and nothing(LOG_PROB).dtype == LOG_PROB


def test_a_log_prob_beyond_float32_is_infinite_which_the_checks_name():
    assert token_array([-1e300], LOG_PROB).tolist() == [-np.inf]


def test_groups_of_a_file_with_lists_are_those_with_arrays():
    for one in synthetic_groups(64, num_groups=2):
        lists = json.loads(json.dumps(group_to_plain(one), default=np.ndarray.tolist))
        assert group_from_plain(lists) == one == group_from_plain(from_bytes(to_bytes(group_to_plain(one))))


@given(
    st.recursive(
        st.just(np.arange(3, dtype=TOKEN)) | st.integers() | st.sampled_from(["__array__", '"__array__":']),
        lambda inner: st.dictionaries(st.sampled_from(["__array__", "__array___", "key", "a"]), inner, max_size=2),
        max_leaves=8,
    )
)
def test_a_state_comes_back_whatever_its_keys_are(value):
    """A prompt's extra_info may have any, also those with which the file names its arrays."""

    def plain(held):
        if isinstance(held, dict):
            return {key: plain(each) for key, each in held.items()}
        return (held.dtype.name, *held.tolist()) if isinstance(held, np.ndarray) else held

    assert plain(from_bytes(to_bytes({"extra_info": value}))) == plain({"extra_info": value})
