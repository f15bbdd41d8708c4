"""Rewards: verifiers by name, custom functions by import path, overlong reward shaping.

A pool of killable processes runs the functions.
"""
