"""The names in a failed transfer's error, and a bucket's requests to the servers.

With real servers: tests/distributed/test_weight_sync_group.py.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.servers.client import FOREIGN_VERSION
from megatron_dapo.weight_sync.buckets import Plan
from megatron_dapo.weight_sync.sender import Sender, Transfer
from megatron_dapo.weight_sync.servers import Call
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

pytestmark = pytest.mark.unit

HEALTHY, OTHER = "http://healthy:1", "http://other:1"


class Calls:
    """All servers there are, but the named ones, say that they live."""

    def __init__(self, *gone: str) -> None:
        self.gone = gone

    def ask(self, urls: object, call: object, timeout_s: float) -> tuple[dict, dict[str, str]]:
        return {}, dict.fromkeys(self.gone, "connection refused")


def named(calls: Calls, other: Future) -> str:
    """The error before the healthy server's answer: it waits in the collective."""
    sender = Sender(0, calls, Plan(()), torch.device("cpu"))
    transfer = Transfer("send", [Call(HEALTHY, Future()), Call(OTHER, other)], Future())
    with pytest.raises(WeightSyncError) as caught:
        sender.settle(transfer, Deadline(0.05))
    return str(caught.value)


def failed(text: str) -> Future:
    answer = Future()
    answer.set_exception(ValueError(text))
    return answer


def test_a_refusing_server_is_named_and_not_its_waiting_peers():
    error = named(Calls(), failed("out of order"))
    assert f"server {OTHER}: ValueError: out of order" in error and HEALTHY not in error


def test_a_dead_server_is_named_before_one_that_fails_because_of_it():
    error = named(Calls(HEALTHY), failed("connection closed by peer"))
    assert f"server {HEALTHY}: connection refused" in error and OTHER not in error


def test_at_the_deadline_the_silent_one_is_named():
    answered = Future()
    answered.set_result(None)
    error = named(Calls(), answered)
    assert f"server {HEALTHY}: no answer to the request" in error and OTHER not in error


@pytest.mark.parametrize("flushes", [True, False])
def test_a_server_has_no_version_between_first_and_last_bucket_and_flushes_only_with_the_last(flushes: bool):
    asked: list[tuple[int, bool]] = []

    class Server:
        async def update_weights_from_distributed(self, *, weight_version: int, flush_cache: bool, **_: object) -> None:
            asked.append((weight_version, flush_cache))

    class Starting:
        def start(self, urls: object, call: Callable, timeout_s: float) -> list[Call]:
            asyncio.run(call(Server()))
            return []

    sender = Sender(0, Starting(), Plan(()), torch.device("cpu"), flushes=flushes)
    sender._group = SimpleNamespace(name="group", broadcast=lambda payload, timeout_s: Future())
    bucket = SimpleNamespace(names=["w"], dtypes=["float32"], shapes=[[1]], flat=False)
    for last in (False, False, True):
        sender.start("send", bucket, [], 7, last, Deadline(1.0))
    assert asked == [(FOREIGN_VERSION, False)] * 2 + [(7, flushes)]
