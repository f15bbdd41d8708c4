"""Prompts, samples, groups, mini-batches, shards and packed micro-batches. Import from here."""

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
from megatron_dapo.data.prompts import FileReport, PromptCursor, PromptDataset, content_key
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.data.types import Group, Prompt, RolloutBatch, Sample

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
    "schedule",
    "schedule_shards",
    "shard_over_data_parallel",
]
