"""Prompts, samples, groups, mini-batches, shards and packed micro-batches.

`batching` and `packing` need torch, which takes seconds to import. The rollout controller does
without them.
"""
