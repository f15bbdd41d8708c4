"""Replay of routing: a router takes the experts that it is given, and weighs them by its own scores.

Megatron has a `RouterReplay` in the same place, driven by lists and actions that are global. Here the experts come with
the micro-batch, so that a pipeline may have several under way. What is given for a layer that will be computed again in
the backward pass (activation recompute) is kept for it: Megatron's schedules compute the micro-batches of a chunk again
in the order of their forward passes, each once.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

UNKNOWN = -1
"""In the place of a token's experts: the router chooses by itself."""


@dataclass(frozen=True, eq=False)
class RouterPass:
    """What the routers of this rank do with one micro-batch.

    experts: [rows, layers, experts per token] int16. Rows: the tokens that this rank's routers meet, in Megatron's
    order s * B + b. Layers: those of this rank that have experts, chunk after chunk.
    records: write the routers' own choices there, but where it says UNKNOWN, in place of replaying what it holds.
    """

    experts: Tensor
    records: bool = False
    has_backward: bool = False


@contextmanager
def router_pass(
    experts: Tensor | None, device: torch.device, *, records: bool, has_backward: bool
) -> Iterator[RouterPass | None]:
    """Have a micro-batch's experts on the device for one pass. What is recorded there is copied back.

    experts: `RouterPass.experts` in the host's memory, since those of a whole step are gigabytes; None = no replay.
    Pinned, no copy holds up the host: all of them, and the kernels between, follow each other in one stream.
    """
    if experts is None:
        yield None
        return
    there = on_device(experts, device)
    yield RouterPass(there, records, has_backward)
    if records and there is not experts:
        experts.copy_(there, non_blocking=True)


def on_device(experts: Tensor, device: torch.device) -> Tensor:
    """Return them there: a copy, or on the CPU themselves."""
    return experts.to(device, non_blocking=True)


class LayerReplay:
    """Stands where Megatron's router has its `router_replay`. layer: its place in `RouterPass.experts`."""

    def __init__(self, chunk: "ChunkReplay", layer: int) -> None:
        self._chunk = chunk
        self._layer = layer
        self.to_recompute: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [rows, topk] of the experts that are taken, with gradient, and the experts."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        running = self._chunk.running
        if running is None:  # computed again in a backward pass, or nothing is replayed
            return self._take(scores, own, self.to_recompute.popleft()) if self.to_recompute else (values, own)
        experts = running.experts[:, self._layer]
        if running.records:
            experts.copy_(torch.where(experts == UNKNOWN, UNKNOWN, own))
            return values, own
        if running.has_backward and not torch.is_grad_enabled():  # by Megatron's checkpoint, which computes it again
            self.to_recompute.append(experts)
        self._chunk.compare(own, experts)
        return self._take(scores, own, experts)

    @staticmethod
    def _take(scores: Tensor, own: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        taken = torch.where(experts == UNKNOWN, own, experts.long())
        return scores.gather(1, taken), taken


class ChunkReplay:
    """The replay of all routers of a chunk of the model.

    running: what they do with the micro-batch whose forward pass is under way. differences: [2], on the device: of the
    (token, layer) that were replayed, how many routers would have chosen other experts; how many there were.
    """

    def __init__(self, routers: Sequence[TopKRouter], first_layer: int) -> None:
        self._layers = [LayerReplay(self, first_layer + number) for number in range(len(routers))]
        for router, layer in zip(routers, self._layers, strict=True):
            router.router_replay = layer
        self.running: RouterPass | None = None
        self.differences: Tensor | None = None

    @contextmanager
    def during(self, running: RouterPass | None) -> Iterator[None]:
        """Have the routers do so in the forward pass inside."""
        self.running = running
        try:
            yield
        finally:
            self.running = None

    def compare(self, own: Tensor, experts: Tensor) -> None:
        """Count the rows [rows, topk] whose experts differ, in whatever order they are."""
        is_known = experts[:, 0] != UNKNOWN
        differs = (own.sort(1).values != experts.sort(1).values).any(1) & is_known
        counts = torch.stack([differs.sum(), is_known.sum()])
        self.differences = counts if self.differences is None else self.differences + counts

    def assert_recomputed(self) -> None:
        """Check, behind a backward pass, that all that was to be computed again was."""
        assert not any(layer.to_recompute for layer in self._layers), "a layer was not computed again"
