"""The calculator: a character-level model learns to work with a tool instead of guessing."""
