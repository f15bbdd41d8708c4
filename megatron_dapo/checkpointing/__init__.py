"""Checkpoints: the content of a folder, its manifest, and resuming a run from it.

Only `checkpointing.torch_dist`, which plans and reads the tensors, needs Megatron.
"""
