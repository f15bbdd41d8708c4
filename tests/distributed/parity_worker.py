"""Run on every rank: log-probs of given sequences and an exported checkpoint, for models x layouts;
saved by rank 0.

Arguments: a JSON file with {"layouts": [[name, sizes, {model: path}], ...], "sequences": [[token,
...], ...], "out": folder}.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.data.batching import TrainSample
from megatron_dapo.data.packing import collate
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_io import export_hf, load_hf_weights
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.schedule import Schedule
from megatron_dapo.weight_sync.buckets import plan_buckets
from tests.distributed.process_groups import leave
from tests.live_bytes import LiveBytes


def sample(index: int, tokens: list[int]) -> TrainSample:
    """A sequence of which every token but the first counts."""
    length = len(tokens)
    mask = np.ones(length, dtype=np.float32)
    mask[-1] = 0
    zeros = np.zeros(length, dtype=np.float32)
    row = np.array(tokens, dtype=np.int64)
    return TrainSample(index, str(index), row, mask, zeros, 0.0, 0 * row)


def log_probs(model, layout: ParallelLayout, samples: list[TrainSample], packed: bool) -> dict[int, torch.Tensor]:
    """sample -> [L - 1], on the rank that has them; {} elsewhere."""
    half = len(samples) // 2
    padding = dict(pad_multiple=layout.sequence_multiple, segment_multiple=layout.segment_multiple)
    batches = [collate(part, packed=packed, **padding) for part in (samples[:half], samples[half:])]
    answers = Schedule(model, model.chunks, temperature=1.0).log_probs(batches)
    if answers is None or layout.tp_rank != 0:
        return {}
    return {
        index: values[:-1]
        for batch, answer in zip(batches, answers, strict=True)
        for index, values in batch.by_sample(answer).items()
    }


BUCKET_BYTES = 2**15


def peak_of_gathering(model, layout: ParallelLayout) -> list[tuple[int, int, int]]:
    """Of each rank: most bytes of tensors in one bucket, bytes of the largest tensor,
    and of all."""
    source = WeightSource(model, layout)
    specs = source.specs()
    sizes = [spec.num_bytes for spec in specs]
    peak = 0
    for bucket in plan_buckets(specs, BUCKET_BYTES, BUCKET_BYTES).buckets:
        with LiveBytes() as live:
            source.gather(list(bucket.specs))
        peak = max(peak, live.peak)
    return layout.gather((peak, max(sizes), sum(sizes)))


def main() -> None:
    torch.set_num_threads(1)
    task = json.loads(Path(sys.argv[1]).read_text())
    samples = [sample(index, tokens) for index, tokens in enumerate(task["sequences"])]
    results = {}
    for layout_name, sizes, models in task["layouts"]:
        layers = sizes.pop("pipeline_layers", None)
        layout = ParallelLayout.initialize(**sizes)
        for model_name, path in models.items():
            megatron = MegatronConfig(pipeline_layers=layers)
            model = build_model(read_model_spec(path), layout, megatron, head_chunk_size=16)
            load_hf_weights(model, path, layout)
            # only a packed micro-batch can be cut
            for packed in (True, False) if layout.cp == 1 else (True,):
                gathered: list = [None] * layout.world_size
                own = log_probs(model, layout, samples, packed)
                dist.all_gather_object(gathered, own, group=layout.cpu_group)
                key = f"{model_name}/{layout_name}/{'packed' if packed else 'padded'}"
                results[key] = {index: values for part in gathered for index, values in part.items()}
            results[f"{model_name}/{layout_name}/peaks"] = peak_of_gathering(model, layout)
            export_hf(model, layout, path, Path(task["out"]) / f"{model_name}-{layout_name}")
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(results, Path(task["out"]) / f"log_probs{dist.get_world_size()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
