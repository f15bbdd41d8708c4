"""Prompts, samples, groups, mini-batches, shards and packed micro-batches. Import from here.

Batches are tensors, and torch takes seconds to import; the rollout controller does without. So their modules are
imported when the first of their names is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_dapo.data.prompt_files import rows_of
from megatron_dapo.data.prompts import FileReport, PromptCursor, PromptDataset, content_key
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.data.types import Group, Prompt, RolloutBatch, Sample

if TYPE_CHECKING:
    from megatron_dapo.data.batching import (
        CostModel,
        Outcome,
        TrainSample,
        assemble,
        group_estimates,
        mini_batches,
        shard_over_data_parallel,
    )
    from megatron_dapo.data.packing import Bins, MicroBatch, check_lengths, collate, schedule, schedule_shards

__all__ = [
    "Bins",
    "CostModel",
    "FileReport",
    "Group",
    "MicroBatch",
    "Outcome",
    "Prompt",
    "PromptCursor",
    "PromptDataset",
    "RolloutBatch",
    "Sample",
    "Tokenizer",
    "TrainSample",
    "assemble",
    "check_lengths",
    "collate",
    "content_key",
    "group_estimates",
    "load_tokenizer",
    "mini_batches",
    "rows_of",
    "schedule",
    "schedule_shards",
    "shard_over_data_parallel",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in ("batching", "packing"):
            found = importlib.import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
