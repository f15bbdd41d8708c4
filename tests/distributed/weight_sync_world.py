"""Trainer ranks as processes under the test's orders, with a sharded random model,
and stand-in servers."""

import hashlib
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from json import loads
from multiprocessing.connection import Connection
from typing import Self

import torch
import torch.distributed as dist

from megatron_dapo.common.errors import MissingRanksError, SharedError
from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.huggingface.model_tensors import ServedTensor
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.platform.agreement import Agreement
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.server_watch import report_unresponsive
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.weight_sync.sync import WeightSync
from tests.distributed import weight_sync_server
from tests.forked_ranks import fork_server
from tests.helpers import free_port

WAIT_S = 60.0  # for processes to start and to answer; far above their need


# ---------------------------------------------------------------------------------------- the model


def model_specs(stage: int, pp: int, num_large: int = 0) -> list[TensorSpec]:
    """Two layers per stage, embeddings at the ends; two dtypes, and one tensor above the flat limit
    (1 MiB). num_large: further ones of that size on each stage, in buckets of their own."""
    specs = [TensorSpec("model.embed_tokens.weight", (128, 2304), torch.float32)] if stage == 0 else []
    for layer in range(2 * stage, 2 * stage + 2):
        for place, module in enumerate(("q_proj", "k_proj", "v_proj")):
            served = ServedTensor(f"model.layers.{layer}.self_attn.qkv_proj.weight", (0, place))
            name = f"model.layers.{layer}.self_attn.{module}.weight"
            specs.append(TensorSpec(name, (32, 64), torch.float32, served=served))
        specs.append(TensorSpec(f"model.layers.{layer}.input_layernorm.weight", (63,), torch.bfloat16))
        specs.append(TensorSpec(f"model.layers.{layer}.self_attn.o_proj.weight", (64, 32), torch.float32))
    specs += [TensorSpec(f"model.large.{stage}.{number}", (128, 2304), torch.float32) for number in range(num_large)]
    return specs + ([TensorSpec("lm_head.weight", (128, 64), torch.float32)] if stage == pp - 1 else [])


def full_tensor(spec: TensorSpec, version: int) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{spec.name} {version}".encode()).digest()[:4], "big")
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).to(spec.dtype)


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def expected_sha256(pp: int, version: int, num_large: int = 0) -> dict[str, str]:
    specs = [spec for stage in range(pp) for spec in model_specs(stage, pp, num_large)]
    return {spec.name: sha256(full_tensor(spec, version)) for spec in specs}


class ShardedModel:
    """A weight source: every tensor is cut along its rows over the tensor-parallel ranks (uneven
    rows are not cut)."""

    def __init__(self, layout: ParallelLayout, num_large: int) -> None:
        self.layout, self.version, self.num_large = layout, 0, num_large

    def specs(self) -> list[TensorSpec]:
        return model_specs(self.layout.pp_rank, self.layout.pp, self.num_large)

    def gather(self, specs: list[TensorSpec]) -> list[torch.Tensor] | None:
        full = []
        for spec in specs:
            tensor = full_tensor(spec, self.version)
            if spec.shape[0] % self.layout.tp == 0:
                shard = tensor.chunk(self.layout.tp)[self.layout.tp_rank].float().contiguous()
                slices = [torch.empty_like(shard) for _ in range(self.layout.tp)]
                dist.all_gather(slices, shard, group=self.layout.tp_group)
                tensor = torch.cat(slices).to(spec.dtype)
            full.append(tensor)
        return full if self.layout.tp_rank == 0 else None


# ------------------------------------------------------------------------------------ trainer ranks


def layout_of(rank: int, tp: int, pp: int, dp: int) -> ParallelLayout:
    """Megatron's order of ranks: tensor, then data, then pipeline."""
    tp_rank, dp_rank, pp_rank = rank % tp, rank // tp % dp, rank // (tp * dp)
    tp_groups = [dist.new_group(list(range(start, start + tp))) for start in range(0, tp * pp * dp, tp)]
    everyone = dist.group.WORLD
    return ParallelLayout(
        rank=rank, world_size=tp * pp * dp, tp=tp, pp=pp, vpp=None, dp=dp, sp=False,
        tp_rank=tp_rank, pp_rank=pp_rank, dp_rank=dp_rank,
        tp_group=tp_groups[rank // tp], pp_group=everyone, copies_group=everyone, cpu_group=everyone,
        agreement=Agreement(everyone, WAIT_S), replicas=(), cpu_model_group=everyone,
    )  # fmt: skip


def serve_orders(pipe: Connection, open_sync: Callable[..., WeightSync], set_version: Callable[[int], None]) -> None:
    """A trainer rank's life: "open" makes the WeightSync, keys make another one with them, a number
    is pushed as a version, None ends it."""
    sync = None
    while (order := pipe.recv()) is not None:
        start = time.monotonic()
        try:
            if order == "open":
                sync, report = open_sync(), None
            elif isinstance(order, dict):
                sync.close()
                sync, report = open_sync(**order), None
            else:
                set_version(order)
                start = time.monotonic()
                report = sync.push(order)
            pipe.send(("ok", report))
        except (SharedError, MissingRanksError) as error:
            pipe.send((str(error), time.monotonic() - start))
    if sync is not None:
        sync.close()
    pipe.send(("closed", None))


def _sharded_rank(
    rank: int,
    pipe: Connection,
    port: int,
    sizes: tuple[int, int, int],
    urls: list[str],
    num_large: int,
    odd_rank: int | None,
    run: RunFolder | None,
    config: dict,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{port}",
        world_size=sizes[0] * sizes[1] * sizes[2],
        rank=rank,
        timeout=timedelta(seconds=WAIT_S),
    )
    model = ShardedModel(layout_of(rank, *sizes), num_large)
    if rank == odd_rank:
        model.specs = lambda: model_specs(model.layout.pp_rank, model.layout.pp)[::-1]

    def open_sync() -> WeightSync:
        keys, device = WeightSyncConfig(**config), torch.device("cpu")
        callbacks = {"report_unresponsive": partial(report_unresponsive, run)} if run else {}
        return WeightSync(model, lambda: urls, SGLangClient, model.layout, keys, device, **callbacks)

    serve_orders(pipe, open_sync, partial(setattr, model, "version"))


class Ranks:
    """Processes that run `target(rank, pipe, *arguments)` and answer orders."""

    def __init__(self, target: Callable[..., None], number: int, *arguments: object) -> None:
        context = fork_server()
        self.pipes, self.processes = [], []
        for rank in range(number):
            near, far = context.Pipe()
            process = context.Process(target=target, args=(rank, far, *arguments), daemon=True)
            process.start()
            self.pipes.append(near)
            self.processes.append(process)

    def order(self, order: object, ranks: Sequence[int] | None = None) -> list[tuple]:
        """Give an order to these ranks (all) and collect their answers:
        ("ok", report) or (error, seconds)."""
        pipes = self.pipes if ranks is None else [self.pipes[rank] for rank in ranks]
        for pipe in pipes:
            pipe.send(order)
        assert all(pipe.poll(WAIT_S) for pipe in pipes), f"a trainer rank hangs over order {order!r}"
        return [pipe.recv() for pipe in pipes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Trainer(Ranks):
    """Trainer ranks of a sharded random model. num_large: of its tensors, as in `model_specs`. run:
    the folder for their notes about servers without an answer."""

    def __init__(
        self,
        urls: Sequence[str],
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        num_large: int = 0,
        odd_rank: int | None = None,
        run: RunFolder | None = None,
        **config: object,
    ) -> None:
        arguments = ((tp, pp, dp), list(urls), num_large, odd_rank, run, config)
        super().__init__(_sharded_rank, tp * pp * dp, free_port(), *arguments)


# ------------------------------------------------------------------------------------------ servers


class Server:
    """A stand-in server process, to be killed and started again at the same address.
    watcher: gets its events."""

    def __init__(self, watcher: Connection | None = None, **faults: object) -> None:
        self._watcher = watcher
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start(**faults)

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                self.seen()
                return
            time.sleep(0.1)
        raise AssertionError(f"the server at {self.url} does not start")

    def start(self, **faults: object) -> None:
        arguments = (self.port, faults, self._watcher)
        self.process = fork_server().Process(target=weight_sync_server.serve, args=arguments, daemon=True)
        self.process.start()

    def kill(self) -> None:
        self.process.kill()  # frozen ones too
        self.process.join()

    def seen(self) -> dict:
        through_no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with through_no_proxy.open(f"{self.url}/seen", timeout=10) as answer:
            return loads(answer.read())

    def wait_until_seen(self, **state: object) -> None:
        """Until it reports this by itself, soon and unawaited."""
        deadline = time.monotonic() + WAIT_S
        while (seen := {key: self.seen()[key] for key in state}) != state:
            assert time.monotonic() < deadline, f"{state} expected, but it is {seen}"
            time.sleep(0.05)

    def __enter__(self) -> "Server":
        self.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
