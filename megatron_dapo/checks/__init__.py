"""Checks of a run before its start: keys, the model, the machine."""
