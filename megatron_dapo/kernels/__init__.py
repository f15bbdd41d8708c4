"""The operations that dominate a step's cost, each with one entry point."""
