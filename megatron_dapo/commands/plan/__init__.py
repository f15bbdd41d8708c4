"""How long a run will take, before it starts: the parts of a step, K, layouts and splits, beside
published runs."""
