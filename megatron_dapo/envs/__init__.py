"""Environments of multi-turn rollouts: the protocol, the built-in ones, and their worker
processes."""
