"""Experience replay where success is rare: a few sums, by a model that guesses their answers."""
