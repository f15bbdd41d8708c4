"""A push of the trainer's weights over NCCL to a stand-in for a server on the same GPU,
byte for byte.

Our side runs as in a job: `WeightSync`, its buckets and its `BroadcastGroup`. The receiver is the
stand-in of tests/distributed. Both processes share the device and talk over the loopback interface,
so the seconds mean nothing.
"""

import asyncio
import json
import multiprocessing
import sys
import time
import urllib.request

from tests.helpers import be_rank_of_another_host, free_port

MIB = 2**20


def receive(port: int) -> None:
    be_rank_of_another_host(1)
    import torch.distributed as dist
    from aiohttp import web

    from tests.distributed import weight_sync_server as stand_in

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    web.run_app(stand_in.application(stand_in.FakeServer({})), host="127.0.0.1", port=port, print=None)


def main() -> int:
    be_rank_of_another_host(0)
    import torch

    from megatron_dapo.platform import nccl
    from megatron_dapo.platform.device import device as this_device
    from megatron_dapo.platform.device import is_gpu

    nccl.prepare()
    from benchmarks.bench_weight_sync import Weights
    from megatron_dapo.config.schema.run import WeightSyncConfig
    from megatron_dapo.platform.parallel import ParallelLayout
    from megatron_dapo.servers.client import SGLangClient
    from megatron_dapo.weight_sync.sync import WeightSync
    from tests.distributed.weight_sync_server import sha256

    gpu, device = is_gpu(), this_device()
    port = free_port()
    server = multiprocessing.get_context("spawn").Process(target=receive, args=(port,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"

    async def healthy() -> None:
        async with SGLangClient(url) as client:
            await client.wait_healthy(60)

    def seen() -> dict:
        with urllib.request.urlopen(f"{url}/seen", timeout=60) as answer:
            return json.load(answer)

    asyncio.run(healthy())
    generator = torch.Generator(device).manual_seed(0)
    rows = 8192 if gpu else 2048
    sizes = {"model.embed_tokens.weight": (rows, 1024), "lm_head.weight": (rows, 1024), "model.norm.weight": (1024,)}
    sizes |= {f"model.layers.{i}.mlp.down_proj.weight": (1024, 2816) for i in range(4 if gpu else 1)}
    dtype = torch.bfloat16 if gpu else torch.float32
    layout = ParallelLayout.initialize()
    bad = 0
    for megabytes in (8, 64):
        tensors = {n: torch.randn(s, generator=generator, device=device).to(dtype) for n, s in sizes.items()}
        config = WeightSyncConfig(timeout_s=60, bucket_size_mb=megabytes)
        sync = WeightSync(Weights(tensors), lambda: [url], lambda url: SGLangClient(url), layout, config, device)
        try:
            for version in (1, 2):
                begun = time.perf_counter()
                report = sync.push(version)
                seconds = time.perf_counter() - begun
                got = seen()
                equal = got["sha256"] == {name: sha256(tensor) for name, tensor in tensors.items()}
                bad += not equal or got["version"] != str(version) and got["version"] != version
                backend = "NCCL" if gpu else "gloo"
                print(f">> {backend}, buckets of {megabytes} MB, push {version}: {report.num_bytes / MIB:.0f} MiB in "
                      f"{report.num_buckets} buckets, {report.num_servers} server, {seconds:.2f} s, "
                      f"{'the same bytes' if equal else 'OTHER BYTES'}")  # fmt: skip
                for tensor in tensors.values():
                    tensor.add_(1)
        finally:
            sync.close()
    server.kill()
    layout.shutdown()
    return 1 if bad else 0 if gpu else 77


if __name__ == "__main__":
    sys.exit(main())
