"""The process's device and backend, its position in the parallel layout, and the CPU adaptations.

The adaptations (`megatron_cpu`, `sglang_cpu`) are imported only without a GPU.
"""
