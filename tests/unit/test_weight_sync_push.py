"""One push with servers that fail in its last phases.

With real servers: tests/distributed/test_weight_sync_group.py. The trainer is one rank, its tensors
are not inspected, and the push's clock moves only when a test moves it.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.platform import agreement as agreement_module
from megatron_dapo.platform.agreement import Agreement, Deadline, SingleRank
from megatron_dapo.weight_sync import sync
from megatron_dapo.weight_sync.buckets import Plan
from megatron_dapo.weight_sync.checksum import checksum
from megatron_dapo.weight_sync.fp8_source import Fp8Source
from megatron_dapo.weight_sync.sender import Sender
from megatron_dapo.weight_sync.servers import FINISH_BATCH_S
from megatron_dapo.weight_sync.sync import WeightSync
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

pytestmark = pytest.mark.unit

SOON_S = 20.0  # far above all needs here
TIMEOUT_S = 100.0


class Server:
    """Has the routes of a push, fails on command, and remembers its state."""

    def __init__(self, url: str) -> None:
        self.url, self.version = url, "default"
        self.pause_mode: str | None = None
        self.paused = self.open = False
        self.failures: list[str] = []  # routes; each entry fails one call
        self.hangs_in_end = False
        self.num_continues = 0
        self.num_infos = 0
        self.size = 1
        self.model_override: str | None = None
        self.going, self.hanging, self.hang_over = threading.Event(), threading.Event(), threading.Event()

    async def _request(self, route: str) -> None:
        await asyncio.sleep(0)  # no answer comes in no time
        if route in self.failures:
            self.failures.remove(route)
            raise ConnectionError(f"{route} is cut off")

    async def server_info(self) -> dict:
        await self._request("server_info")
        self.num_infos += 1
        return {"tp_size": self.size, "json_model_override_args": self.model_override}

    async def weight_version(self) -> str:
        await self._request("weight_version")
        return self.version

    async def pause(self, mode: str) -> None:
        self.paused = True
        self.pause_mode = mode
        self.going.clear()
        await self._request("pause")

    async def continue_(self) -> None:
        await self._request("continue_")
        self.num_continues += 1
        self.paused = False
        self.going.set()

    async def begin_weight_update(self) -> None:
        await self._request("begin_weight_update")
        assert not self.open
        self.open = True

    async def end_weight_update(self) -> None:
        if self.hangs_in_end:
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.hang_over.set()
        await self._request("end_weight_update")
        self.open = False

    async def checksums(self) -> list[dict[str, str]]:
        await self._request("checksums")
        return [{"model.norm.weight": checksum(torch.zeros(2, 2))}]

    async def close(self) -> None:
        pass


class World:
    """Some servers, and a sync with `sending` as its sender's work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.servers: dict[str, Server] = {}
        self.sending: Callable[[], None] = lambda: None

    def add(self, name: str) -> Server:
        return self.servers.setdefault(f"http://{name}:1", Server(f"http://{name}:1"))

    def all_time_is_over(self) -> None:
        self.now += 10 * TIMEOUT_S

    def monotonic(self) -> float:
        return self.now

    def make_sender(self, *_: object, flushes: bool) -> "World":
        self.flushes = flushes
        return self

    # sync.Sender's steps in a push

    def join(self, sizes: dict[str, int], deadline: object) -> None:
        self.members = list(sizes)
        self.sizes = sizes

    def start(self, *_: object) -> None:
        self.sending()
        for url in self.members:
            self.servers[url].version = "1"

    def do_nothing(self, *_: object) -> None:
        pass

    pack = settle = abandon = forget = close = do_nothing


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(agreement_module, "time", world)
    monkeypatch.setattr(Agreement, "of_all_ranks", lambda timeout_s, error: SingleRank(error))
    monkeypatch.setattr(sync, "Sender", world.make_sender)
    spec = TensorSpec("model.norm.weight", (2, 2), torch.float32)
    source = SimpleNamespace(specs=lambda: [spec], gather=lambda specs: [torch.zeros(2, 2)])
    layout = SimpleNamespace(rank=0, pp_rank=0, pp=1, gathers=True, is_source=True)
    world.open = lambda in_blocks=False, **keys: WeightSync(
        Fp8Source(source) if in_blocks else source,
        lambda: list(world.servers),
        lambda url: world.servers[url],
        layout,
        WeightSyncConfig(timeout_s=TIMEOUT_S, verify=True, **keys),
        torch.device("cpu"),
    )
    world.sync = world.open()
    yield world
    world.sync.close()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_only_a_push_that_retracts_flushes_and_only_one_in_place_waits_for_the_batch(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(
        "megatron_dapo.weight_sync.servers.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep})
    )
    server = world.add("one")
    world.sync.close()
    world.sync = world.open(pause_mode=mode)
    assert world.sync.push(1).num_servers == 1
    assert server.pause_mode == mode and world.flushes == (mode == "retract")
    assert waits == ([FINISH_BATCH_S] if mode == "in_place" else [])


@pytest.mark.parametrize("route", ["end_weight_update", "weight_version", "continue_"])
def test_a_server_that_fails_after_the_last_bucket_generates_again(world, route):
    other, server = world.add("other"), world.add("server")
    world.sending = lambda: server.failures.append(route)
    report = world.sync.push(1)
    assert report.num_servers == (2 if route == "continue_" else 1)
    assert not other.paused and not other.open
    assert server.going.wait(SOON_S), "it bears the version, so nobody else would set it going"
    assert not server.open


def test_only_a_server_that_was_started_again_is_asked_for_its_size_again(world):
    steady, restarted = world.add("steady"), world.add("restarted")
    for _ in range(2):
        assert world.sync.push(1).num_servers == 2
    assert (steady.num_infos, restarted.num_infos) == (1, 1)
    restarted.version = "default"
    restarted.size = 2
    assert world.sync.push(1).num_servers == 2
    assert (steady.num_infos, restarted.num_infos) == (1, 2)
    assert world.sizes == {steady.url: 1, restarted.url: 2}


@pytest.mark.parametrize("in_blocks", [True, False])
def test_a_server_that_joins_and_was_started_for_weights_of_another_form_is_left_out_and_named(
    world: World, caplog: pytest.LogCaptureFixture, in_blocks: bool
) -> None:
    of_blocks = '{"quantization_config": {"weight_block_size": [128, 128]}}'
    forms = {True: of_blocks, False: "{}"}
    world.add("fitting").model_override = forms[in_blocks]
    world.sync.close()
    world.sync = world.open(in_blocks=in_blocks)
    assert world.sync.push(1).num_servers == 1
    joined = world.add("joined")
    joined.model_override = forms[not in_blocks]
    for _ in range(2):
        caplog.clear()
        assert world.sync.push(1).num_servers == 1
        assert joined.version == "default" and joined.url not in world.members
        key = "fp8" if in_blocks else "null"
        assert f"quantization is {key}, but server {joined.url} was not started for it" in caplog.text
    joined.model_override = forms[in_blocks]
    assert world.sync.push(1).num_servers == 2


@pytest.mark.parametrize("names", [["server"], ["server", "lost"]])
def test_weights_are_compared_on_the_servers_that_answer(world, names):
    for name in names:
        world.add(name).failures += ["checksums"] * (name == "lost")
    assert world.sync.push(1).num_verified == 1


def test_without_a_server_that_answers_nothing_is_compared(world):
    world.add("lost").failures.append("checksums")
    assert world.sync.push(1).num_verified == 0


def test_servers_that_took_the_last_bucket_at_the_deadline_confirm_and_go_on(world):
    server = world.add("server")
    world.sending = world.all_time_is_over
    assert world.sync.push(1).num_servers == 1
    assert not server.paused and not server.open


def test_without_the_last_server_the_push_is_over_also_at_the_deadline(world):
    server = world.add("server")

    def freeze() -> None:
        world.all_time_is_over()
        server.failures += ["end_weight_update"] * 2
        raise WeightSyncError("send: no answer")

    world.sending = freeze
    assert world.sync.push(1).num_servers == 0
    assert server.going.wait(SOON_S), "once it answers it generates, for who asks it"


def test_between_two_attempts_the_others_stay_paused(world):
    """They hold some of the weights: a token that they wrote then would make its whole answer
    useless."""
    steady, lost = world.add("steady"), world.add("lost")
    seen = []

    def send() -> None:
        seen.append((steady.paused, steady.open, steady.num_continues))
        if len(seen) == 1:
            lost.failures += ["end_weight_update"] * 3
            raise WeightSyncError("send: the connection broke")

    world.sending = send
    report = world.sync.push(1)
    assert report.num_servers == 1 and seen == [(True, True, 0)] * 2
    assert steady.num_continues == 1 and not steady.paused and not steady.open and steady.version == "1"


def test_at_the_deadline_a_failure_that_does_not_explain_all_servers_is_an_error(world):
    steady, frozen = world.add("steady"), world.add("frozen")

    def freeze() -> None:
        world.all_time_is_over()
        frozen.failures.append("end_weight_update")
        raise WeightSyncError("send: no answer")

    world.sending = freeze
    with pytest.raises(WeightSyncError, match="send: no answer"):
        world.sync.push(1)
    assert not steady.paused and not steady.open and steady.version == "default"


def test_a_server_that_lives_and_is_too_slow_is_an_error(world):
    server = world.add("server")

    def be_slow() -> None:
        world.all_time_is_over()
        raise WeightSyncError("send: no answer")

    world.sending = be_slow
    with pytest.raises(WeightSyncError, match="send: no answer"):
        world.sync.push(1)
    assert not server.paused and server.version == "default"


def test_what_sets_a_server_going_that_was_left_out_ends_before_the_next_push_opens_a_session(world):
    server = world.add("server")
    server.hangs_in_end = True
    server.failures.append("pause")
    assert world.sync.push(1).num_servers == 0
    assert server.hanging.wait(SOON_S)
    server.hangs_in_end = False
    assert world.sync.push(1).num_servers == 1
    assert server.hang_over.wait(SOON_S), "otherwise it would close the session of the second push"


def test_an_abandoned_group_is_destroyed_once_by_every_member_after_its_return(monkeypatch):
    asked: list[tuple[str, str]] = []

    class Calls:
        def start(self, urls, call, timeout_s) -> list:
            for url in urls:
                asyncio.run(call(Member(url)))
            return []

    class Member:
        def __init__(self, url: str) -> None:
            self.url = url

        async def init_weights_update_group(self, **_: object) -> None:
            pass

        async def destroy_weights_update_group(self, group_name: str) -> None:
            asked.append((self.url, group_name))

    def group(name: str, address: str, world_size: int, *_: object) -> SimpleNamespace:
        ready: Future = Future()
        ready.set_result(None)
        return SimpleNamespace(
            name=name, address=address, port=1, world_size=world_size, backend="gloo", ready=ready, close=lambda: None
        )

    monkeypatch.setattr("megatron_dapo.weight_sync.sender.BroadcastGroup", group)
    steady, lost = "http://127.0.0.1:1", "http://127.0.0.1:2"
    sender, deadline = Sender(0, Calls(), Plan(()), torch.device("cpu")), Deadline(SOON_S)
    sender.join({steady: 1, lost: 1}, deadline)
    sender.abandon()
    sender.join({steady: 1}, deadline)
    assert not asked, "the push is not over"
    sender.forget([steady])
    ((url, name),) = asked
    assert url == steady
    sender.forget([steady, lost])
    assert asked[1:] == [(lost, name)]
    sender.forget([steady, lost])
    assert len(asked) == 2
