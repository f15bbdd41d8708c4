"""The work of a stage's source rank: form a group with the servers, and send buckets while watching
both ends."""

import uuid
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.weight_sync.broadcast_group import BroadcastGroup, address_towards
from megatron_dapo.weight_sync.buckets import Bucket, Plan
from megatron_dapo.weight_sync.servers import (
    BACKGROUND_S,
    PROBE_S,
    UNFINISHED_VERSION,
    Call,
    ServerCalls,
    ServerControl,
    culprits,
    reason,
)
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

BUCKETS_IN_FLIGHT = 2
"""Buckets sent and not yet answered. One is received while the servers have the next one's request;
a third would need one more buffer and wait for the same connection."""


@dataclass(frozen=True)
class Transfer:
    """One bucket, or the rendezvous, under way: the servers' answers and the trainer's end of the
    collective."""

    what: str
    calls: Sequence[Call]
    collective: Future

    @property
    def futures(self) -> list[Future]:
        return [self.collective, *(call.answer for call in self.calls)]

    def refused(self) -> dict[str, str]:
        """Return the failed servers by URL, with the error of the call."""
        ended = ((call.url, call.answer.exception()) for call in self.calls if call.answer.done())
        return {url: reason(error) for url, error in ended if error is not None}

    def silent(self) -> dict[str, str]:
        """Return the servers without an answer by URL, with a phrase for the error."""
        return {call.url: "no answer to the request" for call in self.calls if not call.answer.done()}


class Sender:
    """Owns the group of one stage and the flat buffers, which buckets use in turn."""

    def __init__(
        self,
        stage: int,
        calls: ServerCalls,
        plan: Plan,
        device: torch.device,
        probe_s: float = PROBE_S,
        flushes: bool = True,
    ) -> None:
        """Allocate the flat buffers.

        Args:
            probe_s: seconds for a server to prove that it is alive after a failure.
            flushes: whether servers empty their caches, which requires that no request uses them.
        """
        self._stage = stage
        self._calls = calls
        self._device = device
        self._probe_s = probe_s
        self._flushes = flushes
        self._buffers = [
            torch.empty(plan.flat_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS_IN_FLIGHT)
        ]
        self._group: BroadcastGroup | None = None
        self._members: tuple[str, ...] = ()
        # name of a group -> the servers that may still hold it
        self._abandoned: dict[str, set[str]] = {}
        self._requests: list[Call] = []  # of the buckets under way

    def join(self, server_sizes: Mapping[str, int], deadline: Deadline) -> None:
        """Form a new group with these servers. server_sizes: URL -> tensor-parallel ranks."""
        self.leave(server_sizes)
        first_ranks: dict[str, int] = {}
        world_size = 1
        for url, size in server_sizes.items():
            first_ranks[url] = world_size
            world_size += size
        # a unique name: a server may still hold the group of a dead run
        name = f"weights-{self._stage}-{uuid.uuid4().hex[:8]}"
        self._members = tuple(server_sizes)
        self._group = group = BroadcastGroup(
            name, address_towards(self._members), world_size, self._device, deadline.left()
        )

        async def init(server: ServerControl) -> None:
            await server.init_weights_update_group(
                master_address=group.address,
                master_port=group.port,
                rank_offset=first_ranks[server.url],
                world_size=group.world_size,
                group_name=group.name,
                backend=group.backend,
            )

        calls = self._calls.start(self._members, init, deadline.left())
        self.settle(Transfer(f"join (stage {self._stage})", calls, group.ready), deadline)

    def leave(self, living: Container[str]) -> None:
        """Give the group up, if there is one; have its living servers destroy it."""
        if self._group is None:
            return
        group = self._group
        self._group = None
        group.close()
        members = [url for url in self._members if url in living]
        self._calls.ask(members, _destroy(group.name), PROBE_S)

    def close(self) -> None:
        """Leave the group."""
        self.leave(self._members)

    def abandon(self) -> None:
        """Give the group up after a failure: returns at once. Its servers hold it until
        `forget`."""
        if self._group is not None:
            self._group.close()
            self._abandoned[self._group.name] = set(self._members)
            self._group = None

    def forget(self, living: Collection[str]) -> None:
        """Have these servers destroy abandoned groups; return at once.

        For the end of a push: earlier, it could hold up a server that still struggles with such a
        group. A server without the group refuses, which is harmless.
        """
        for name, members in self._abandoned.items():
            reachable = members.intersection(living)
            members -= reachable
            self._calls.start(reachable, _destroy(name), BACKGROUND_S)
        self._abandoned = {name: members for name, members in self._abandoned.items() if members}

    def pack(self, index: int, bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors to broadcast for bucket number `index`: its flat buffer, or its
        tensors one by one."""
        check_gathered(bucket, tensors)
        if not bucket.flat:
            return [tensor.detach().to(self._device).contiguous() for tensor in tensors]
        flat = self._buffers[index % BUCKETS_IN_FLIGHT][: bucket.num_bytes]
        fill(flat, tensors)
        return [flat]

    def start(
        self, what: str, bucket: Bucket, payload: Sequence[Tensor], version: int, last: bool, deadline: Deadline
    ) -> Transfer:
        """Begin to send a bucket, possibly while earlier ones are under way: the servers process
        their requests in order.

        With the last bucket they flush their caches and take the version. Until then they report
        UNFINISHED_VERSION, since they hold neither the old nor the new weights.
        """
        assert self._group is not None
        name = self._group.name

        async def update(server: ServerControl) -> None:
            await server.update_weights_from_distributed(
                names=bucket.names,
                dtypes=bucket.dtypes,
                shapes=bucket.shapes,
                group_name=name,
                weight_version=version if last else UNFINISHED_VERSION,
                flush_cache=last and self._flushes,
                load_format="flattened_bucket" if bucket.flat else None,
            )

        calls = self._calls.start(self._members, update, deadline.left())
        self._requests = [call for call in self._requests if not call.answer.done()] + calls
        return Transfer(what, calls, self._group.broadcast(payload, deadline.left()))

    def settle(self, transfer: Transfer, deadline: Deadline) -> None:
        """Wait until every server has answered and the collective is through.

        Raises WeightSyncError naming the dead servers; if none is dead, the refusing ones; if none
        refused, those without an answer in time.
        """
        pending = wait(transfer.futures, timeout=deadline.left(), return_when=FIRST_EXCEPTION).not_done
        if not pending and all(future.exception() is None for future in transfer.futures):
            return
        # read before requests are withdrawn and the group goes: both make healthy servers' calls
        # fail too
        refused = transfer.refused()
        silent = transfer.silent()
        collective = transfer.collective
        error = collective.exception() if collective.done() else None
        collective_error = "none" if error is None else reason(error)
        # first: a server that the end of the group frees would begin with the next bucket
        self._withdraw_requests()
        self.abandon()
        _, gone = self._calls.ask(self._members, lambda server: server.weight_version(), self._probe_s)
        # the refusing server ended the wait; healthy ones were in the collective with it, and
        # silent too
        named = culprits(gone or refused or silent) or "no server names an error"
        raise WeightSyncError(f"{transfer.what}: {named} (error of the collective: {collective_error})")

    def _withdraw_requests(self) -> None:
        """Cancel the requests under way. A server that has not begun one would otherwise meet a
        broken group, in the session of the next attempt."""
        for call in self._requests:
            call.answer.cancel()
        self._requests = []


def check_gathered(bucket: Bucket, tensors: Sequence[Tensor]) -> None:
    """Raise WeightSyncError if tensors differ from the bucket's plan in shape or dtype."""
    for spec, tensor in zip(bucket.specs, tensors, strict=True):
        if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != spec.dtype:
            raise WeightSyncError(f"{spec.name}: gathered {tuple(tensor.shape)} {tensor.dtype}, planned {spec}")


def fill(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy tensors into a buffer of bytes, one after the other."""
    start = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        flat[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        start += size


def _destroy(name: str) -> Callable[[ServerControl], Awaitable[None]]:
    return lambda server: server.destroy_weights_update_group(name)
