"""Which layers each chunk of a pipeline has. Only this module knows: the model, its memory and its time ask here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.huggingface.model_spec import ModelSpec


@dataclass(frozen=True)
class PipelineSplit:
    """A model's layers over the chunks of its pipeline.

    num_stages: pipeline ranks. layers: number of layers of each chunk, in the order in which tokens pass the chunks.
    Chunk c is on stage c modulo num_stages; without virtual stages each stage has one. The first chunk has the
    embedding besides, the last one the final norm and the head.
    """

    num_stages: int
    layers: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Return the number of layers of the largest chunk."""
        return max(self.layers)

    @property
    def is_even(self) -> bool:
        return len(set(self.layers)) == 1

    @property
    def has_idle_chunk(self) -> bool:
        """Return whether a chunk has nothing to do: no layer, and neither the embedding nor the head."""
        return 0 in self.layers[1:-1]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the number of layers of each chunk of a stage."""
        return self.layers[stage :: self.num_stages]

    def layers_of(self, stage: int) -> int:
        """Return the number of layers of a stage."""
        return sum(self.chunks_of(stage))

    def numbers_of(self, stage: int) -> list[int]:
        """Return which layers a stage has, counted from 0."""
        chunks = range(stage, len(self.layers), self.num_stages)
        return [number for chunk in chunks for number in self.numbers(chunk)]

    def numbers(self, chunk: int) -> range:
        """Return which layers a chunk has, counted from 0."""
        first = sum(self.layers[:chunk])
        return range(first, first + self.layers[chunk])

    def __str__(self) -> str:
        """Return the layers of the chunks, as in "11, 6 x 12, 11"."""
        runs = [(number, len(list(equal))) for number, equal in groupby(self.layers)]
        return ", ".join(f"{number}" if length == 1 else f"{length} x {number}" for number, length in runs)


def pipeline_split(
    num_layers: int, num_stages: int, chunks_per_stage: int, pipeline_layers: Sequence[int] | None = None
) -> PipelineSplit:
    """Return the split that the config gives (`pipeline_layers`), or else the one that is as even as possible.

    Where the layers do not divide, embedding and head count as one layer each: the stages before the last one have one
    layer more than the others, and the first stage only if all but the last have. So no stage has more of all three
    together than it must. A stage's layers, which do not depend on chunks_per_stage, are cut over its chunks likewise.
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
    """Return parts that differ by one layer at most. The later ones have more, save one with the head, the last."""
    share, rest = divmod(num_layers, num_parts)
    end = num_parts - 1 if has_head else num_parts
    return [share + (end - rest <= part < end) for part in range(num_parts)]
