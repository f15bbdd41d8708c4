"""Router replay: a router takes the given experts, and weighs them by its own scores.

Megatron has a `RouterReplay` in the same place, driven by global lists and actions. Here the
experts come with the micro-batch, so that a pipeline may have several under way.

With activation recompute, a layer keeps its given experts for the backward pass. Megatron's
schedules compute the micro-batches of a chunk again in the order of their forward passes, each
once.
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
    """The task of this rank's routers in one micro-batch."""

    experts: Tensor
    """[rows, layers, experts per token] int16.

    Rows: the tokens met by this rank's routers, in Megatron's order s * B + b. Layers: this rank's
    with experts, chunk after chunk.
    """
    records: bool = False
    """Write the routers' own choices there, except at UNKNOWN, instead of replaying its content."""
    has_backward: bool = False


@contextmanager
def router_pass(
    experts: Tensor | None, device: torch.device, *, records: bool, has_backward: bool
) -> Iterator[RouterPass | None]:
    """Have a micro-batch's experts on the device for one pass. Records are copied back.

    experts: `RouterPass.experts` in the host's memory, since a whole step has gigabytes of them;
    None for no router replay. In pinned memory, no copy holds up the host: all copies, and the
    kernels between, follow each other in one stream.
    """
    if experts is None:
        yield None
        return
    there = on_device(experts, device)
    yield RouterPass(there, records, has_backward)
    if records and there is not experts:
        experts.copy_(there, non_blocking=True)


def on_device(experts: Tensor, device: torch.device) -> Tensor:
    """Return them on the device: a copy, or on the CPU themselves."""
    return experts.to(device, non_blocking=True)


class _LayerReplay:
    """Takes the place of the `router_replay` of Megatron's router.

    layer: its place in `RouterPass.experts`.
    """

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
        """Return the scores [rows, topk] of the taken experts, with gradient, and the experts."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        running = self._chunk.running
        if running is None:  # recomputed in a backward pass, or no router replay
            return self._take(scores, own, self.to_recompute.popleft()) if self.to_recompute else (values, own)
        experts = running.experts[:, self._layer]
        if running.records:
            experts.copy_(torch.where(experts == UNKNOWN, UNKNOWN, own))
            return values, own
        # Megatron's checkpoint runs it, and computes it again
        if running.has_backward and not torch.is_grad_enabled():
            self.to_recompute.append(experts)
        self._chunk.compare(own, experts)
        return self._take(scores, own, experts)

    @staticmethod
    def _take(scores: Tensor, own: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        taken = torch.where(experts == UNKNOWN, own, experts.long())
        return scores.gather(1, taken), taken


class ChunkReplay:
    """The router replay of a chunk of the model.

    running: of the micro-batch in its forward pass. differences: [2], on the device: the number of
    replayed (token, layer) with other experts by the router's own choice; the number of all
    replayed.
    """

    def __init__(self, routers: Sequence[TopKRouter], first_layer: int) -> None:
        self._layers = [_LayerReplay(self, first_layer + number) for number in range(len(routers))]
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
        """Count the rows [rows, topk] with different experts, in any order."""
        is_known = experts[:, 0] != UNKNOWN
        differs = (own.sort(1).values != experts.sort(1).values).any(1) & is_known
        counts = torch.stack([differs.sum(), is_known.sum()])
        self.differences = counts if self.differences is None else self.differences + counts

    def assert_recomputed(self) -> None:
        """Check, after a backward pass, that nothing is left to recompute."""
        assert not any(layer.to_recompute for layer in self._layers), "a layer was not computed again"
