"""Which prompts of two files a run would draw, and in which order."""
