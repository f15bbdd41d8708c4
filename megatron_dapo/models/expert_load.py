"""Tokens of samples per expert in the forward passes of an update, without padding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from megatron_dapo.models.layers import Router


class ChunkLoad:
    """Counts the choices of a chunk's routers.

    counts: [layers with experts, experts + 1] int64, on the device; None before the first
    micro-batch. The tokens of each expert; last, their expected total: experts per token for each
    token.
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        for layer, router in enumerate(routers):
            router.on_routed = partial(self._count, layer, router.topk)
        self.num_layers = len(routers)
        self._is_token: Tensor | None = None
        self.counts: Tensor | None = None

    @contextmanager
    def during(self, is_token: Tensor | None) -> Iterator[None]:
        """Count in the forward pass inside, not in its recomputation for a backward pass.

        is_token: [rows] bool, the tokens of samples among those met by this rank's routers; None to
        count nothing.
        """
        self._is_token = is_token
        try:
            yield
        finally:
            self._is_token = None

    def reset(self) -> None:
        """Begin a new count."""
        self.counts = None

    def _count(self, layer: int, experts_per_token: int, routing_map: Tensor) -> None:
        """Add the tokens of a micro-batch. routing_map: [rows, experts] bool."""
        if self._is_token is None:
            return
        of_experts = (routing_map & self._is_token[:, None]).sum(0)
        if self.counts is None:
            self.counts = of_experts.new_zeros(self.num_layers, len(of_experts) + 1)
        self.counts[layer, :-1] += of_experts
        self.counts[layer, -1] += self._is_token.sum() * experts_per_token
