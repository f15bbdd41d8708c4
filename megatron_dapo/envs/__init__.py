"""Environments of multi-turn rollouts: the protocol, those that are shipped, and the processes that they run in."""
