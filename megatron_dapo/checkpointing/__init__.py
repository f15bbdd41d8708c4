"""Checkpoints: what a folder holds, its manifest, and resuming a run from it.

Only `checkpointing.torch_dist`, which writes and reads the tensors, needs torch and Megatron.
"""
