"""Rollout: the SGLang client, the supervisor of servers, the controller that fills steps, the trainer's handle."""
