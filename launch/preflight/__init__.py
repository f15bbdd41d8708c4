"""Checks the nodes of a run before it starts, names the bad one and the cure: python -m
launch.preflight --help."""
