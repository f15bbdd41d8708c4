"""On-policy distillation: the demo's base model learns from a teacher on its own samples.

No reward enters the loss.
"""
