"""Pure tensor functions of the algorithm: advantages, losses, aggregation, KL, metric sums.

No Megatron, no I/O, no config objects.
"""
