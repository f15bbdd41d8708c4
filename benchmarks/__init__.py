"""Time, memory and error of the kernels, beside every other implementation that can be imported here.

`python benchmarks/bench_NAME.py --help`; `make bench` runs them all. What they show is read in docs/kernels.md.
"""
