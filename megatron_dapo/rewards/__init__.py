"""Rewards: verifiers by name, custom functions by import path, the pool of killable processes that
runs them,
and overlong reward shaping."""
