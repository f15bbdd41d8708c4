"""The operations whose cost decides a step, each with one entry point."""
