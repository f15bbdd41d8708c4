"""Objects with arrays come back as they were, as bytes and by pipe;
arrays are views of the bytes."""

import os
import pickle
import threading
from multiprocessing import Pipe

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.common.rollout_errors import RolloutError
from megatron_dapo.data.flat_pickle import ALIGNMENT, _behind, flat_pickle, from_flat_pickle, receive, send
from megatron_dapo.data.samples import RolloutBatch
from megatron_dapo.data.token_arrays import repeated
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

DTYPES = st.sampled_from([np.uint8, np.int32, np.float32, np.int64])
ARRAYS = st.builds(lambda length, dtype: np.arange(length).astype(dtype), st.integers(0, 40), DTYPES)
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | ARRAYS, lambda inner: st.lists(inner, max_size=4), max_leaves=12
)


def plain(value):
    """Lists and numbers, with the dtypes of arrays, so that they can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    return [plain(each) for each in value] if isinstance(value, list) else value


@given(VALUES)
def test_any_object_comes_back_as_it_was(value):
    assert plain(from_flat_pickle(flat_pickle(value))) == plain(value)


def test_arrays_are_views_of_the_bytes_at_places_that_suit_their_elements():
    array = np.arange(1000, dtype=np.int64)
    flat = flat_pickle(["x", np.arange(3, dtype=np.uint8), array, {"a": array}])
    assert len(flat) < array.nbytes + 1000, "what stands in two places is written once"
    _, small, first, second = from_flat_pickle(flat)
    assert np.shares_memory(first, flat) and np.shares_memory(small, flat) and second["a"] is first
    assert first.ctypes.data % ALIGNMENT == flat.ctypes.data % ALIGNMENT == 0


def through_a_pipe(*values):
    here, there = Pipe()
    sender = threading.Thread(target=lambda: [send(there, value) for value in values])
    sender.start()
    received = [receive(here) for _ in values]
    sender.join()
    return received


def test_what_is_larger_than_a_pipe_holds_comes_through_whole_and_in_order():
    large = np.random.default_rng(1).integers(0, 256, 3_500_001).astype(np.uint8)
    first, second, third = through_a_pipe(large, "between", large[::-1].copy())
    assert np.array_equal(first, large) and second == "between" and np.array_equal(third, large[::-1])


def test_a_batch_and_an_error_come_through_a_pipe_as_they_were():
    batch = RolloutBatch(tuple(synthetic_groups(64)), {"a": 1.0})
    answers = through_a_pipe(("ok", batch), ("error", RolloutError("lost")))
    assert answers[0] == ("ok", batch)
    assert type(answers[1][1]) is RolloutError and str(answers[1][1]) == "lost"


def test_where_the_other_end_closes_the_end_is_seen():
    here, there = Pipe()
    there.close()
    with pytest.raises(EOFError):
        receive(here)


def test_what_was_sent_is_whole_before_it_is_received_and_leaves_no_open_file():
    """So a dying sender leaves no half of an object behind,
    and nobody waits for the rest of one."""
    num_open = len(os.listdir("/proc/self/fd"))
    here, there = Pipe()
    send(there, np.arange(10**6))
    there.close()
    (array,) = [receive(here)]
    here.close()
    assert array.sum() == 10**6 * (10**6 - 1) // 2
    assert len(os.listdir("/proc/self/fd")) <= num_open + 1, "the map's own"
    del array
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_more_arrays_than_one_call_of_the_system_writes_come_through():
    arrays = [np.full(number % 7, number, dtype=np.int32) for number in range(3000)]
    (received,) = through_a_pipe(arrays)
    assert plain(received) == plain(arrays)


def test_what_the_system_writes_in_part_is_written_whole():
    views = [memoryview(bytes([number]) * 5) for number in range(4)]
    for num_bytes in range(21):
        assert b"".join(_behind(views, num_bytes)) == b"".join(views)[num_bytes:]


def test_an_array_that_repeats_a_value_is_written_once():
    value = {"versions": repeated(7, 10**6, np.int32), "mask": repeated(1, 0, np.uint8), "between": np.arange(3)}
    flat = flat_pickle(value)
    assert len(flat) < 1000
    received = from_flat_pickle(flat)
    assert plain(list(received.values())) == plain(list(value.values()))


@pytest.mark.parametrize("name", ["two dimensions", "every third", "turned round", "a number", "objects"])
def test_arrays_of_any_form_come_back_as_they_were(name):
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    forms = {
        "two dimensions": matrix,
        "every third": np.arange(10)[::3],
        "turned round": matrix.T,
        "a number": np.array(3.0),
        "objects": np.array([None, "a"], dtype=object),
    }
    array = forms[name]
    first, received = from_flat_pickle(flat_pickle([np.arange(5), array]))
    assert received.dtype == array.dtype and np.array_equal(received, array) and first.tolist() == [0, 1, 2, 3, 4]


def test_samples_cost_their_arrays_and_little_more():
    """The pickle itself holds no token."""
    groups = synthetic_groups(64, num_groups=2, max_response=20_000)
    num_bytes = sum(
        13 * sample.num_response_tokens + 4 * len(sample.prompt_tokens) for group in groups for sample in group.samples
    )
    assert num_bytes > 500_000 and len(flat_pickle(groups)) < num_bytes + 20_000
    assert len(pickle.dumps(groups, protocol=5)) > num_bytes
