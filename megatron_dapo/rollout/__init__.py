"""Rollout: the controller that fills steps with groups, and the trainer's handle of it."""
