"""Buckets of a stage under way at once, and the fate of the others when one fails."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.weight_sync.buckets import Plan
from megatron_dapo.weight_sync.sender import BUCKETS_IN_FLIGHT, Sender
from megatron_dapo.weight_sync.servers import Call
from megatron_dapo.weight_sync.stage import StageSource, StageTotals
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
DEADLINE = Deadline(20.0)


class Recorder:
    """A source and a sender: the calls to them, and the bucket that fails to arrive."""

    def __init__(self, fails: int | None = None) -> None:
        self.fails = fails
        self.events: list[tuple[str, int]] = []

    def gather(self, specs: list[int]) -> list:
        self.events.append(("gather", specs[0]))
        return []

    def pack(self, index: int, bucket: object, tensors: object) -> int:
        self.events.append(("pack", index))
        return index

    def start(self, what: str, bucket: object, index: int, version: int, is_last: bool, deadline: Deadline) -> int:
        assert is_last == bucket.is_last
        self.events.append(("start", index))
        return index

    def settle(self, index: int, deadline: Deadline) -> None:
        if index == self.fails:
            raise WeightSyncError(f"bucket {index}")
        self.events.append(("settle", index))


def send(recorder: Recorder, num_buckets: int, stage: int = 0, num_stages: int = 1) -> StageTotals | None:
    last = num_buckets - 1 if stage == num_stages - 1 else None
    buckets = tuple(SimpleNamespace(specs=(index,), is_last=index == last) for index in range(num_buckets))
    plan = SimpleNamespace(buckets=buckets, num_bytes=0, num_tensors=0)
    layout = SimpleNamespace(pp_rank=stage, pp=num_stages)
    source = StageSource(recorder, plan, layout, SimpleNamespace(verify_num_tensors=1), recorder, CPU)
    return source.send(stage, 7, DEADLINE)


@given(num_buckets=st.integers(1, 9), stage=st.integers(0, 1))
def test_buckets_begin_and_end_in_order_two_at_a_time_and_a_buffer_is_filled_when_it_is_free(num_buckets, stage):
    recorder = Recorder()
    totals = send(recorder, num_buckets, stage, num_stages=2)
    assert totals is not None and set(totals.seconds) == {"gather", "send"}
    for kind in ("gather", "pack", "start", "settle"):
        assert [index for what, index in recorder.events if what == kind] == list(range(num_buckets))
    in_flight: set[int] = set()
    most = 0
    for what, index in recorder.events:
        if what == "gather":
            assert len(in_flight) == min(2, index), "what estimates.memory counts"
        elif what == "pack":
            users = {other for other in in_flight if other % BUCKETS_IN_FLIGHT == index % BUCKETS_IN_FLIGHT}
            assert not users, "its buffer is still being sent"
        elif what == "start":
            assert not in_flight or stage == 0 or index < num_buckets - 1, "the version comes when all else is there"
            in_flight.add(index)
            most = max(most, len(in_flight))
        elif what == "settle":
            in_flight.remove(index)
    assert most == min(2, num_buckets if stage == 0 else max(1, num_buckets - 1))


@given(num_buckets=st.integers(1, 9), data=st.data())
def test_after_a_bucket_that_fails_none_is_sent_and_the_others_of_the_stage_go_on_gathering(num_buckets, data):
    fails = data.draw(st.integers(0, num_buckets - 1))
    recorder = Recorder(fails)
    with pytest.raises(WeightSyncError, match=f"bucket {fails}"):
        send(recorder, num_buckets)
    assert [index for what, index in recorder.events if what == "gather"] == list(range(num_buckets))
    assert max(index for what, index in recorder.events if what == "start") <= fails + 1
    assert [index for what, index in recorder.events if what == "settle"] == list(range(fails))


def test_when_a_bucket_fails_the_requests_of_the_next_one_are_withdrawn():
    """A server that took one up later would look for a broken group,
    in the session of the next attempt."""
    answers: list[Future] = []

    class Calls:
        def start(self, urls: object, call: object, timeout_s: float) -> list[Call]:
            answers.append(Future())
            return [Call("http://one:1", answers[-1])]

        def ask(self, urls: object, call: object, timeout_s: float) -> tuple[dict, dict[str, str]]:
            return {}, {}

    sender = Sender(0, Calls(), Plan(()), CPU)
    group = SimpleNamespace(name="group", broadcast=lambda payload, timeout_s: Future(), close=lambda: None)
    sender._group = group
    bucket = SimpleNamespace(names=["w"], dtypes=["float32"], shapes=[[1]], flat=False)
    first, _ = (sender.start(f"bucket {number}", bucket, [], 7, False, DEADLINE) for number in (1, 2))
    answers[0].set_exception(ValueError("out of order"))
    with pytest.raises(WeightSyncError, match="bucket 1: server http://one:1: ValueError: out of order"):
        sender.settle(first, DEADLINE)
    assert answers[1].cancelled()
