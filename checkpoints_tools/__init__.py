"""Commands to convert, inspect and verify checkpoints, and to drop repeated prompts; see
docs/checkpoints.md.

Each is `python -m checkpoints_tools.NAME`; import from the modules, not from here.
"""
