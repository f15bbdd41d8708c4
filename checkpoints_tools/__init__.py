"""Commands that convert, inspect and verify checkpoints, and one that drops repeated prompts; see
docs/checkpoints.md.

Each is `python -m checkpoints_tools.NAME`; import from the modules, not from here.
"""
