"""Agents: programs that know a base URL, and produce trajectories."""
