"""Experience replay where success is rare: the same sums, by a model that has nearly given up working them out."""
