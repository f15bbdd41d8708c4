"""Which device and backend this process uses, its place in the parallel layout, and the CPU adaptations.

The adaptations (`megatron_cpu`, `sglang_cpu`) are imported only where there is no GPU.
"""
