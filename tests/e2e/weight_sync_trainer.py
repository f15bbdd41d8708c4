"""A trainer rank with a real Megatron model and new weights at every version."""

import asyncio
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import ClassVar

import psutil
import torch

from megatron_dapo import placement as placement_module
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import ModelParts, build_model
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.models.peft_folder import load_adapters
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.placement import SharedGpus
from megatron_dapo.platform.device import device
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import given_server_key
from megatron_dapo.weight_sync.fp8_source import Fp8Source
from megatron_dapo.weight_sync.sync import WeightSync
from tests.distributed.weight_sync_world import serve_orders


class DeadlyClient(SGLangClient):
    """Kills its server, with all of its processes, while the update number `fatal_update` is
    on its way."""

    def __init__(self, url: str, key: str, pid: int, fatal_update: int) -> None:
        super().__init__(url, key)
        self._pid, self._left = pid, fatal_update

    async def update_weights_from_distributed(self, *args: object, **kwargs: object) -> None:
        self._left -= 1
        answer = asyncio.ensure_future(super().update_weights_from_distributed(*args, **kwargs))
        if self._left == 0:
            await asyncio.sleep(0.002)
            server = psutil.Process(self._pid)
            for process in [*server.children(recursive=True), server]:
                process.kill()
        await answer


class FreezingClient(SGLangClient):
    """Stops its server, with all of its processes, at the second bucket of a push by handles.
    `frozen`: URL -> process, once each; without a process the bucket is not sent."""

    frozen: ClassVar[dict[str, int | None]] = {}

    def __init__(self, url: str, key: str | None) -> None:
        super().__init__(url, key)
        self._num_updates = 0

    async def update_weights_from_tensor(self, *args: object, **kwargs: object) -> None:
        self._num_updates += 1
        if self._num_updates == 2 and self.url in self.frozen:
            if (pid := self.frozen.pop(self.url)) is None:
                return
            server = psutil.Process(pid)
            for process in [*server.children(recursive=True), server]:
                process.suspend()
        await super().update_weights_from_tensor(*args, **kwargs)


def changed(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The weights of a version, from those of the checkpoint: other bits everywhere,
    and of the same size."""
    return tensor * (1.0 + 0.001 * version) if version else tensor


@dataclass(frozen=True)
class TrainedNothing:
    """A policy without an optimizer."""

    model: ModelParts


def _built(
    rank: int,
    port: int,
    world_size: int,
    sizes: dict[str, int],
    path: str,
    adapter: tuple[str, LoraSettings] | None = None,
) -> tuple[ModelParts, ParallelLayout, Callable[[int], None]]:
    """The model of a rank, its layout, and what gives the model the weights of a version."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    layout = ParallelLayout.initialize(**sizes, timeout_s=60)
    lora = None if adapter is None else adapter[1]
    model = build_model(read_model_spec(path), layout, MegatronConfig(dtype="float32"), lora=lora)
    load_hf_weights(model, path, layout)
    if adapter is not None:
        load_adapters(model, layout, adapter[0])
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    original = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def set_version(version: int) -> None:
        if adapter is not None:
            return
        for parameter, start in zip(parameters, original, strict=True):
            parameter.copy_(changed(start, version))

    return model, layout, set_version


def shared_rank_main(
    rank: int,
    pipe: Connection,
    port: int,
    world_size: int,
    sizes: dict[str, int],
    path: str,
    overrides: list[str],
    frozen: dict[str, int | None],
) -> None:
    """As `rank_main`, on the GPUs of the servers: between two pushes the rank's weights are parked.
    frozen: of FreezingClient."""
    FreezingClient.frozen = dict(frozen)
    placement_module.SGLangClient = FreezingClient
    model, layout, set_weights = _built(rank, port, world_size, sizes, path)
    config = load_config(None, overrides)
    placement = SharedGpus(config, layout, RunFolder.of(config.trainer), lambda phase: nullcontext())

    def open_sync() -> SharedGpus:
        placement.to_trainer()
        placement.hold(WeightSource(model, layout), [TrainedNothing(model)])
        return placement

    def set_version(version: int) -> None:
        placement.to_trainer()
        set_weights(version)

    serve_orders(pipe, open_sync, set_version)


def rank_main(
    rank: int,
    pipe: Connection,
    port: int,
    world_size: int,
    sizes: dict[str, int],
    path: str,
    servers: list[str],
    deadly: dict[str, tuple[int, int]],
    config: dict,
    adapter: tuple[str, LoraSettings] | None = None,
    in_blocks: bool = False,
) -> None:
    """sizes: of the layout. servers: overrides that name them. deadly: URL -> (process, the update
    during its kill). adapter: a PEFT folder, pushed merged at every version. in_blocks: as FP8."""
    model, layout, set_version = _built(rank, port, world_size, sizes, path, adapter)

    def open_sync(**changes: object) -> WeightSync:
        server_config = load_config(None, servers)
        key = given_server_key(server_config)

        def connect(url: str) -> SGLangClient:
            return DeadlyClient(url, key, *deadly[url]) if url in deadly else SGLangClient(url, key)

        source, keys = WeightSource(model, layout), WeightSyncConfig(**(config | changes))
        return WeightSync(
            Fp8Source(source) if in_blocks else source,
            ServerList.of_config(server_config.actor_rollout_ref.rollout).read_or_keep,
            connect,
            layout,
            keys,
            device(),
        )

    serve_orders(pipe, open_sync, set_version)
