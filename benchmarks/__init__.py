"""Time, memory and error of the kernels, beside every other importable implementation.

`python benchmarks/bench_NAME.py --help`; `make bench` runs them all. docs/kernels.md explains
their figures.
"""
