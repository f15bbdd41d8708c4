"""A push of the weights to one server, beside raw broadcasts of the same tensors.

The push is a share of the raw broadcast's rate, over the same kind of group (NCCL on GPUs, else
gloo), to the same process. On one GPU both processes share it, and talk over the loopback
interface: that shows that it runs, and says nothing about its speed.

raw, kept: into the receiver's present tensors. raw, fresh: into tensors allocated for it, as SGLang
does. raw, loaded: the same, and each is then copied into a kept one, as a model's. One request asks
for all of them.

The stand-in keeps a push's tensors and loads nothing. A real server (--server) copies them into its
model, and its raw broadcasts go to a process of their own. "between buckets" is the part of a push
without anything received by the stand-in. Meanwhile it answers a request and takes up the next one,
which it has already.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from aiohttp import web
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.measure import in_turns, ratio_of
from benchmarks.report import plain_table, written
from benchmarks.synthetic_model import ModelSize
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.platform import nccl
from megatron_dapo.platform.device import collective_backend, device, is_gpu
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import read_server_key
from megatron_dapo.weight_sync.broadcast_group import BroadcastGroup
from megatron_dapo.weight_sync.buckets import plan_for
from megatron_dapo.weight_sync.sync import WeightSync
from tests.distributed import weight_sync_server
from tests.helpers import be_rank_of_another_host, free_port
from tests.tiny_models import make_tiny

LIMIT_S = 120.0
BUCKET_SIZES_MB = (64, 8)  # the largest on a CPU, and a size at which requests weigh more
RAW = ("kept", "fresh", "loaded")
SERVED_SIZES = (
    {"layers": 8, "hidden": 768, "heads": 12, "kv_heads": 6},
    {"layers": 8, "hidden": 1920, "heads": 12, "kv_heads": 6},
)
QUICK_SERVED_SIZES = ({"layers": 2, "hidden": 64},)
SIZES = {
    "quick": ModelSize(hidden=64, ffn=128, layers=2, vocab=256),
    "stand-in": ModelSize(hidden=1024, ffn=2816, layers=5, vocab=8192),
}


class RawReceiver(weight_sync_server.FakeServer):
    """The stand-in server, also for broadcasts of many tensors with one request."""

    def __init__(self, faults: dict) -> None:
        super().__init__(faults)
        self.kept: list[Tensor] = []
        self._between_s = 0.0
        self._last_end: float | None = None

    def begin_weight_update(self, body: dict) -> None:
        """Open the session; no bucket of it has come."""
        super().begin_weight_update(body)
        self._between_s = 0.0
        self._last_end = None

    def update_weights_from_distributed(self, body: dict) -> None:
        """Receive a bucket; count the seconds since the last one."""
        if self._last_end is not None:
            self._between_s += time.perf_counter() - self._last_end
        super().update_weights_from_distributed(body)
        self._last_end = time.perf_counter()

    def between_buckets(self) -> dict[str, float]:
        """Return the seconds of the last push without anything received."""
        return {"seconds": self._between_s}

    def end_weight_update(self, body: dict) -> None:
        """Close the session without the stand-in's fingerprint, which reads all tensors."""
        self.open = False

    def receive_raw(self, body: dict) -> None:
        """Receive broadcasts.

        body: group_name; shapes and dtypes of the tensors; into: a word of RAW.
        """
        described = list(zip(body["shapes"], (getattr(torch, name) for name in body["dtypes"]), strict=True))
        if not self.kept:
            self.kept = [torch.zeros(shape, dtype=dtype, device=device()) for shape, dtype in described]
        for number, (shape, dtype) in enumerate(described):
            fresh = body["into"] != "kept"
            tensor = torch.empty(shape, dtype=dtype, device=device()) if fresh else self.kept[number]
            dist.broadcast(tensor, src=0, group=self.groups[body["group_name"]])
            if body["into"] == "fresh":
                self.tensors[str(number)] = tensor
            elif body["into"] == "loaded":
                self.kept[number].copy_(tensor)
        if is_gpu():
            torch.cuda.synchronize()


def receive(port: int) -> None:
    be_rank_of_another_host(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    server = RawReceiver({})

    async def raw(request: web.Request) -> web.Response:
        await asyncio.to_thread(server.receive_raw, await request.json())
        return web.json_response({"success": True})

    application = weight_sync_server.application(server)

    async def between(request: web.Request) -> web.Response:
        return web.json_response(server.between_buckets())

    application.add_routes([web.post("/receive_raw", raw), web.post("/between_buckets", between)])
    web.run_app(application, host="127.0.0.1", port=port, print=None)


@contextmanager
def stand_in() -> Iterator[str]:
    """Yield the URL of a stand-in server in a process of its own."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(port,), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_wait(url))
        yield url
    finally:
        process.kill()
        process.join()


async def _wait(url: str) -> None:
    async with SGLangClient(url) as client:
        await client.wait_healthy(LIMIT_S)


class Weights:
    """A source with all its tensors whole, as a trainer of one rank."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()]

    def gather(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        return [self.tensors[spec.name] for spec in specs]


class Raw:
    """A group with a stand-in server; a push's tensors are sent over it as they lie in memory."""

    def __init__(self, url: str, weights: Weights, bucket_size_mb: int) -> None:
        self._url = url
        self._payload = []
        for bucket in plan_for(device(), weights.specs(), bucket_size_mb).buckets:
            tensors = weights.gather(bucket.specs)
            whole = [torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])]
            self._payload += whole if bucket.flat else tensors
        self._group = BroadcastGroup(f"raw-{free_port()}", "127.0.0.1", 2, device(), LIMIT_S)
        fields = {
            "master_address": self._group.address,
            "master_port": self._group.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": self._group.name,
            "backend": collective_backend(),
        }
        asyncio.run(self._post("/init_weights_update_group", fields))
        self._group.ready.result(LIMIT_S)

    def send(self, into: str) -> dict[str, float]:
        """Broadcast everything; return the seconds until the receiver confirms it."""
        fields = {
            "group_name": self._group.name,
            "shapes": [list(tensor.shape) for tensor in self._payload],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in self._payload],
            "into": into,
        }
        start = time.perf_counter()
        done = self._group.broadcast(self._payload, LIMIT_S)
        asyncio.run(self._post("/receive_raw", fields))
        done.result(LIMIT_S)
        return {"total": time.perf_counter() - start}

    async def _post(self, route: str, fields: dict) -> None:
        async with SGLangClient(self._url) as client:
            await client.post(route, fields)


class Pushes:
    """Pushes of one version after the other. key: of a real server; None for the stand-in."""

    def __init__(
        self, url: str, key: str | None, weights: Weights, layout: ParallelLayout, bucket_size_mb: int
    ) -> None:
        self._stand_in = url if key is None else None
        config = WeightSyncConfig(timeout_s=LIMIT_S, bucket_size_mb=bucket_size_mb)
        self.sync = WeightSync(weights, lambda: [url], lambda url: SGLangClient(url, key), layout, config, device())
        self.num_buckets = 0
        self._version = 0

    def send(self) -> dict[str, float]:
        self._version += 1
        start = time.perf_counter()
        report = self.sync.push(self._version)
        total = time.perf_counter() - start
        assert report.num_servers == 1, "the server was lost"
        self.num_buckets = report.num_buckets
        phases = {phase: seconds for phase, seconds in report.seconds.items() if phase != "join"}
        if self._stand_in is not None:
            phases["between buckets"] = asyncio.run(_between_buckets(self._stand_in))
        return {"total": total, **phases}


async def _between_buckets(url: str) -> float:
    async with SGLangClient(url) as client:
        answer = await client.post("/between_buckets", {})
    return answer["seconds"]


def measured(
    name: str,
    weights: Weights,
    layout: ParallelLayout,
    bucket_size_mb: int,
    rounds: int,
    server: ServerSupervisor | None,
) -> dict:
    """Return the times of raw broadcasts and pushes in turns, to one process.

    With a real server the raw ones go to a stand-in.
    """
    with stand_in() as url:
        raw = Raw(url, weights, bucket_size_mb)
        key = None if server is None else read_server_key(server.key_file)
        pushes = Pushes(url if server is None else server.urls[0], key, weights, layout, bucket_size_mb)
        try:
            samplers: dict[str, Callable[[], dict[str, float]]] = {
                **{f"raw, {into}": partial(raw.send, into) for into in RAW},
                "push": pushes.send,
            }
            samples = in_turns(samplers, rounds, warm_up=1)
        finally:
            pushes.sync.close()
    num_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
    return summary(name, num_bytes, pushes.num_buckets, rounds, samples)


def summary(
    name: str, num_bytes: int, num_buckets: int, rounds: int, samples: dict[str, list[dict[str, float]]]
) -> dict:
    """Return medians, and the ratio of a push's rate to a raw broadcast's in the same round.

    A push without more time has the ratio 1.
    """
    phases = samples["push"][0]
    return {
        "receiver": name,
        "num_bytes": num_bytes,
        "num_buckets": num_buckets,
        "rounds": rounds,
        "seconds": {way: statistics.median(sample["total"] for sample in taken) for way, taken in samples.items()},
        "push_s": {phase: statistics.median(sample[phase] for sample in samples["push"]) for phase in phases},
        "share_of_raw": {
            way: ratio_of(samples[way], "total", samples["push"], "total") for way in samples if way != "push"
        },
    }


def show(result: dict) -> None:
    title = f"{result['num_bytes'] / 1e6:.0f} MB to {result['receiver']}, {result['num_buckets']} buckets"
    table = plain_table(f"{title} (median of {result['rounds']})", ("", "seconds", "MB/s", "the push at its rate"))
    for way, seconds in result["seconds"].items():
        share = result["share_of_raw"].get(way)
        rate = f"{result['num_bytes'] / seconds / 1e6:.0f}"
        table.add_row(way, f"{seconds:.3f}", rate, "" if share is None else f"{share:.0%}")
    Console(width=110).print(table)
    print("of a push: " + ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in result["push_s"].items()))


@contextmanager
def real_server(folder: Path, size: dict[str, int]) -> Iterator[tuple[ServerSupervisor, Path]]:
    """Yield a running SGLang server and its model's folder."""
    model = make_tiny(folder / "model", "llama", **size)
    settings = [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.run_dir={folder}/run",
        "actor_rollout_ref.rollout.server.max_total_tokens=2048",
        "actor_rollout_ref.rollout.server.startup_timeout_s=300.0",
    ]
    supervisor = ServerSupervisor(load_config(None, settings), folder)
    supervisor.start()
    try:
        supervisor.wait_healthy()
        yield supervisor, model
    finally:
        supervisor.stop()


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 0.5 MB: does it run?")
    parser.add_argument("--rounds", type=int, help="times each is measured, in turns (default: 7)")
    parser.add_argument("--server", action="store_true", help="a real SGLang server as well")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 7)
    be_rank_of_another_host(0)
    nccl.prepare()
    generator = torch.Generator().manual_seed(0)
    size = SIZES["quick" if options.quick else "stand-in"]
    weights = Weights({name: torch.randn(shape, generator=generator).to(device()) for name, shape in size.shapes()})
    layout = ParallelLayout.initialize()
    try:
        results = [measured("a stand-in", weights, layout, size_mb, rounds, None) for size_mb in BUCKET_SIZES_MB]
        sizes = QUICK_SERVED_SIZES if options.quick else SERVED_SIZES
        for served in sizes if options.server else ():
            with (
                tempfile.TemporaryDirectory(prefix="weight-sync-") as folder,
                real_server(Path(folder), served) as (server, model),
            ):
                weights = Weights(load_file(model / "model.safetensors", device=str(device())))
                results += [measured("SGLang", weights, layout, size_mb, rounds, server) for size_mb in BUCKET_SIZES_MB]
    finally:
        layout.shutdown()
    for result in results:
        show(result)
    return written("weight_sync", device(), results, options.json)


if __name__ == "__main__":
    main()
