"""Layers of each pipeline chunk. Only this module knows: model, memory and time ask here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.huggingface.model_spec import ModelSpec


@dataclass(frozen=True)
class PipelineSplit:
    """A model's layers over the chunks of its pipeline.

    Chunk c is on stage c modulo num_stages; without virtual stages each stage has one chunk. The
    first chunk also has the embedding, the last one the final norm and the head.
    """

    num_stages: int  # pipeline ranks
    layers: tuple[int, ...]  # number of layers of each chunk, in a token's order

    @property
    def largest(self) -> int:
        """Return the number of layers of the largest chunk."""
        return max(self.layers)

    @property
    def is_even(self) -> bool:
        return len(set(self.layers)) == 1

    @property
    def has_idle_chunk(self) -> bool:
        """Return whether a chunk is idle: without layers, embedding or head."""
        return 0 in self.layers[1:-1]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the number of layers of each chunk of a stage."""
        return self.layers[stage :: self.num_stages]

    def layers_of(self, stage: int) -> int:
        """Return the number of layers of a stage."""
        return sum(self.chunks_of(stage))

    def numbers_of(self, stage: int) -> list[int]:
        """Return the numbers of a stage's layers, counted from 0."""
        chunks = range(stage, len(self.layers), self.num_stages)
        return [number for chunk in chunks for number in self.numbers(chunk)]

    def numbers(self, chunk: int) -> range:
        """Return the numbers of a chunk's layers, counted from 0."""
        first = sum(self.layers[:chunk])
        return range(first, first + self.layers[chunk])

    def __str__(self) -> str:
        """Return the layers of the chunks, as in "11, 6 x 12, 11"."""
        runs = [(number, len(list(equal))) for number, equal in groupby(self.layers)]
        return ", ".join(f"{number}" if length == 1 else f"{length} x {number}" for number, length in runs)


def pipeline_split(
    num_layers: int, num_stages: int, chunks_per_stage: int, pipeline_layers: Sequence[int] | None = None
) -> PipelineSplit:
    """Return the config's split (`pipeline_layers`), or else the most even one.

    For an uneven number of layers, embedding and head count as one layer each. The stages before
    the last have one layer more than the others; the first stage only if all but the last have. So
    no stage has more of all three together than necessary. A stage's layers, the same for any
    chunks_per_stage, are cut over its chunks likewise.
    """
    if pipeline_layers is not None:
        return PipelineSplit(num_stages, tuple(pipeline_layers))
    layers = [0] * (num_stages * chunks_per_stage)
    for stage, number in enumerate(_cut(num_layers, num_stages, has_head=True)):
        layers[stage::num_stages] = _cut(number, chunks_per_stage, has_head=stage == num_stages - 1)
    return PipelineSplit(num_stages, tuple(layers))


def split_of(spec: ModelSpec, sizes: ParallelSizes) -> PipelineSplit:
    """Return the split of a model at parallel sizes."""
    return pipeline_split(spec.num_layers, sizes.pp, sizes.vpp or 1, sizes.pipeline_layers)


def _cut(num_layers: int, num_parts: int, *, has_head: bool) -> list[int]:
    """Return parts with a difference of one layer at most: more in the later ones, but not in the
    last if it has the head."""
    share, rest = divmod(num_layers, num_parts)
    end = num_parts - 1 if has_head else num_parts
    return [share + (end - rest <= part < end) for part in range(num_parts)]


def kinds_of(spec: ModelSpec, layers: Sequence[int]) -> dict[int, int]:
    """Return a layer of each kind among these, and their number: dense or with experts, attention
    or a delta net."""
    kinds = {layer: (spec.has_experts(layer), spec.has_attention(layer)) for layer in layers}
    numbers = Counter(kinds.values())
    return {layer: numbers[kind] for kind, layer in {kinds[layer]: layer for layer in reversed(layers)}.items()}
