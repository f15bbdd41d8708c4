"""Reward functions of each form."""
