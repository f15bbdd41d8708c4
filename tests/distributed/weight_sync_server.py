"""A stand-in for an SGLang server as a process: its routes, its end of the process group,
real receives.

Faults: die_at_update, freeze_at_update, refuse_at_update (numbers from 1 on), corrupt (a tensor's
name). It keeps the tensors it receives under their Hugging Face names; its checksums are per fused
parameter, as in SGLang. It has no model: its responses are random letters of random length. Every
token's log-prob is -`fingerprint` of the tensors held at that moment, so a sample tells of its
weights even under a wrong label. Its pipe reports at once, in order, every call and every written
token.
"""

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from megatron_dapo.platform.device import device, is_gpu

TIMEOUT = timedelta(minutes=30)  # as in SGLang: nothing on this side ends a wait early


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def join(address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> dist.ProcessGroup:
    """As sglang.srt.utils.init_custom_process_group does."""
    if is_gpu():
        torch.cuda.set_device(device())  # of this thread
    store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    store = PrefixStore(name, store)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), store, group_name=name, backend_options=None, timeout=TIMEOUT
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


EOS, LETTERS = 1, range(29, 50)  # in the vocabulary of tests/tiny_models.py
TOKEN_S = 0.04
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def fingerprint(tensors: dict[str, torch.Tensor]) -> float:
    """Between 0 and 1, and other for other tensors."""
    sums = " ".join(f"{name} {sha256(tensors[name])}" for name in sorted(tensors))
    return int(hashlib.sha256(sums.encode()).hexdigest()[:12], 16) / 16**12


class FakeServer:
    def __init__(self, faults: dict[str, int | str]) -> None:
        self.faults = faults
        self.report: Callable[[str, dict], None] = lambda name, body: None
        self.version = "default"
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.paused = self.open = False
        self.fingerprint = 0.0
        self.num_updates = 0
        self.log: list[str] = []
        self.aborted: set[str] = set()

    def init_weights_update_group(self, body: dict) -> None:
        arguments = (body[k] for k in ("master_address", "master_port", "rank_offset", "world_size", "group_name"))
        self.groups[body["group_name"]] = join(*arguments, body["backend"])

    def destroy_weights_update_group(self, body: dict) -> None:
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def pause_generation(self, body: dict) -> None:
        assert body["mode"] == "retract"
        self.paused = True

    def continue_generation(self, body: dict) -> None:
        self.paused = False

    def begin_weight_update(self, body: dict) -> None:
        assert self.paused and not self.open, "a weight-update session is already open"
        self.open = True

    def end_weight_update(self, body: dict) -> None:
        assert self.open, "no weight-update session is open"
        self.fingerprint = fingerprint(self.tensors)
        self.open = False

    def update_weights_from_distributed(self, body: dict) -> None:
        assert self.open, "must run between begin_weight_update() and end_weight_update()"
        self.num_updates += 1
        if self.num_updates == int(self.faults.get("die_at_update", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_updates == int(self.faults.get("freeze_at_update", 0)):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.num_updates == int(self.faults.get("refuse_at_update", 0)):
            raise ValueError("out of order")
        group = self.groups[body["group_name"]]
        specs = list(zip(body["names"], map(lambda d: getattr(torch, d), body["dtypes"]), body["shapes"], strict=True))
        if body.get("load_format") == "flattened_bucket":
            sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in specs]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device())
            dist.broadcast(flat, src=0, group=group)
            for (name, dtype, shape), part in zip(specs, flat.split(sizes), strict=True):
                assert part.storage_offset() % dtype.itemsize == 0, f"unaligned {name}"
                self.tensors[name] = part.view(dtype).view(shape)
        else:
            for name, dtype, shape in specs:
                self.tensors[name] = torch.empty(shape, dtype=dtype, device=device())
                dist.broadcast(self.tensors[name], src=0, group=group)
        if is_gpu():
            torch.cuda.synchronize()
        self.version = body.get("weight_version", self.version)

    def weights_checker(self, body: dict) -> dict:
        fused: dict[str, list[str]] = {}
        for part, whole in FUSED.items():
            for name in self.tensors:
                if f".{part}_proj." in name:
                    fused.setdefault(name.replace(f".{part}_proj.", f".{whole}_proj."), []).append(name)
        parts = {name for names in fused.values() for name in names}
        whole = {n: t for n, t in self.tensors.items() if n not in parts}
        whole |= {name: torch.cat([self.tensors[part] for part in parts]) for name, parts in fused.items()}
        if (corrupt := self.faults.get("corrupt")) in whole:
            whole[corrupt] = whole[corrupt] + 1e-7
        return {"ranks": [{"checksums": {name: sha256(tensor)[:16] for name, tensor in whole.items()}}]}

    def abort_request(self, body: dict) -> None:
        self.aborted.add(body["rid"])

    async def generate(self, body: dict) -> dict:
        """A response, token by token. A paused server goes on with it later, by the weights of
        then; an aborted one ends with its tokens so far."""
        limit = body["sampling_params"]["max_new_tokens"]
        tokens = [random.choice(LETTERS) for _ in range(random.randrange(limit + 2))][:limit]
        tokens += [EOS] * (len(tokens) < limit)
        written = []
        for token in tokens:
            await asyncio.sleep(TOKEN_S)
            while self.paused:
                await asyncio.sleep(TOKEN_S)
            if body.get("rid") in self.aborted:
                break
            written.append((self.version, [-self.fingerprint, token, None]))
            self.report("token", {})
        spans, start = [], 0
        for version, some in groupby(version for version, _ in written):
            end = start + len(list(some))
            spans.append({"version": version, "start": start, "end": end})
            start = end
        is_whole = len(written) == len(tokens)
        tokens = tokens[: len(written)]
        reason = "abort" if not is_whole else "stop" if tokens[-1] == EOS else "length"
        meta = {"output_token_logprobs": [scored for _, scored in written], "weight_versions": spans}
        return {"output_ids": tokens, "meta_info": {**meta, "finish_reason": {"type": reason}}}


ROUTES = (
    "init_weights_update_group destroy_weights_update_group pause_generation continue_generation begin_weight_update "
    "end_weight_update update_weights_from_distributed weights_checker abort_request"
).split()


def application(server: FakeServer) -> web.Application:
    def route(name: str):
        async def handle(request: web.Request) -> web.Response:
            body = await request.json()
            server.log.append(name)
            server.report(name, body)
            try:
                answer = await asyncio.to_thread(getattr(server, name), body)
            except Exception as error:
                return web.json_response({"success": False, "message": f"{type(error).__name__}: {error}"}, status=400)
            return web.json_response({"success": True, "message": "Success", **(answer or {})})

        return web.post(f"/{name}", handle)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        server.report("generate", body)
        try:
            return web.json_response(await server.generate(body))
        finally:
            server.report("end of generate", body)

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({}, status=503 if server.paused else 200)

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": server.version})

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response({"tp_size": 1, "version": "0.5.23"})

    async def seen(_: web.Request) -> web.Response:
        """For the tests: the received bytes, and the order of the routes' calls."""
        sums = {name: sha256(tensor) for name, tensor in server.tensors.items()}
        state = {"version": server.version, "paused": server.paused, "open": server.open}
        return web.json_response({"sha256": sums, "log": server.log, "num_groups": len(server.groups), **state})

    application = web.Application()
    gets = {"/ready": ready, "/model_info": model_info, "/server_info": server_info, "/seen": seen}
    application.add_routes([route(name) for name in ROUTES] + [web.get(path, tell) for path, tell in gets.items()])
    application.add_routes([web.post("/generate", generate)])
    return application


def serve(port: int, faults: dict[str, int | str], watcher: Connection | None = None) -> None:
    """Run one. watcher: gets the name and the body of each event: a call of a route, a token, the
    end of a response.

    A request ends with its client's connection, as in SGLang:
    nothing is written for a vanished client.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    server = FakeServer(faults)
    if watcher is not None:
        server.report = lambda name, body: watcher.send((name, body))
    web.run_app(application(server), host="127.0.0.1", port=port, print=None, handler_cancellation=True)
