"""Checks of a run before it starts: keys together, the model and this machine; memory and recomputation."""
