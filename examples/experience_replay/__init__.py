"""Experience replay for rare success: a few sums, and a model with guesses for answers."""
