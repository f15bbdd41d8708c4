"""Buckets by handles among four real ranks: each rank of each server gets a copy of every stage's.

Servers are stand-ins, and a handle is a list of its bucket's tensors. tests/e2e has real servers.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.weight_sync import handle_push, handles
from megatron_dapo.weight_sync.buckets import Bucket
from megatron_dapo.weight_sync.servers import UNFINISHED_VERSION, ServerCalls
from tests.distributed.weight_sync_world import WAIT_S, Ranks, ShardedModel, expected_sha256, layout_of, sha256
from tests.helpers import free_port

pytestmark = pytest.mark.distributed

NUM_RANKS = 4
LAYOUTS = {"TP 2, PP 2": (2, 2, 1), "PP 2, DP 2": (1, 2, 2), "TP 4": (4, 1, 1), "DP 4": (1, 1, 4)}
NUM_SERVERS = {"of TP 1": 4, "of TP 2": 2, "of TP 4": 1}


def contents(flat: torch.Tensor, bucket: Bucket) -> str:
    """Stands for a handle: name -> digest of each tensor."""
    start, digests = 0, {}
    for spec in bucket.specs:
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        digests[spec.name] = sha256(flat[start : start + size])
        start += size
    assert start == len(flat)
    return json.dumps(digests)


class StandIn:
    """A server that notes its updates, or refuses them."""

    def __init__(self, url: str, noted: list, failing: list[str]) -> None:
        self.url, self._noted, self._failing = url, noted, failing

    async def update_weights_from_tensor(self, serialized: Sequence[str], *, weight_version: int, flush_cache: bool):
        if self.url in self._failing:
            raise ConnectionError("it died")
        self._noted.append((list(map(json.loads, serialized)), weight_version, flush_cache))

    async def close(self) -> None: ...


def rank_main(rank: int, pipe: Connection, port: int, sizes: tuple[int, int, int], urls: list[str]) -> None:
    """Send a version to the named servers at each order; answer with the own server's updates."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=NUM_RANKS, rank=rank, timeout=limit)
    model = ShardedModel(layout_of(rank, *sizes), num_large=0)
    noted: list = []
    failing: list[str] = []
    calls = ServerCalls(lambda url: StandIn(url, noted, failing))
    handle_push.serialized, handle_push.prepare_handles = contents, lambda: None
    keys, cpu = WeightSyncConfig(bucket_size_mb=1, timeout_s=WAIT_S), torch.device("cpu")
    nothing: Any = None  # servers that sleep and wake, and a trainer with memory to free
    places = handles.places(urls, NUM_RANKS)
    push = handle_push.HandlePush(model, nothing, calls, places, model.layout, keys, cpu, nothing, nothing)
    while (order := pipe.recv()) is not None:
        model.version, members, failing[:] = order
        noted.clear()
        _, _, why = push._send(members, model.version, Deadline(WAIT_S))
        pipe.send(("ok", (list(noted), why)))


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def sizes(request) -> tuple[int, int, int]:
    return request.param


@pytest.mark.parametrize("num_servers", NUM_SERVERS.values(), ids=NUM_SERVERS)
def test_every_rank_of_every_server_gets_each_stages_tensors_once_and_the_version_last(sizes, num_servers):
    urls = [f"http://s{number}:1" for number in range(num_servers)]
    size = NUM_RANKS // num_servers
    with Ranks(rank_main, NUM_RANKS, free_port(), sizes, urls) as trainer:
        for version in (1, 2):
            answers = [answer for _, answer in trainer.order((version, urls, []))]
            for rank, (updates, why) in enumerate(answers):
                assert why is None and bool(updates) == (rank % size == 0), "one rank posts for each server"
            for updates, _ in answers[::size]:
                check_updates(updates, size, sizes[1], version)


def check_updates(updates: list, size: int, pp: int, version: int) -> None:
    """A server's ranks got everything once, and the version with the last bucket."""
    seen: list[dict[str, str]] = [{} for _ in range(size)]
    for entries, _, _ in updates:
        for of_rank, entry in zip(seen, entries, strict=True):
            assert of_rank.keys().isdisjoint(entry)
            of_rank |= entry
    assert seen == [expected_sha256(pp, version)] * size
    *early, last = [update[1:] for update in updates]
    assert early and set(early) == {(UNFINISHED_VERSION, False)} and last == (version, True)


def test_a_server_that_is_no_member_or_dies_costs_the_others_nothing():
    urls = ["http://s0:1", "http://s1:1"]
    with Ranks(rank_main, NUM_RANKS, free_port(), LAYOUTS["TP 2, PP 2"], urls) as trainer:
        answers = [answer for _, answer in trainer.order((1, urls[1:], []))]
        assert [bool(updates) for updates, _ in answers] == [False, False, True, False]
        check_updates(answers[2][0], 2, 2, 1)
        answers = [answer for _, answer in trainer.order((2, urls, urls[1:]))]
        # both ranks of a server know
        assert [why and "it died" in why for _, why in answers] == [None, None, True, True]
        check_updates(answers[0][0], 2, 2, 2)
