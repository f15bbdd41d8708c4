"""Metrics and their sinks: console, metrics.jsonl, TensorBoard, W&B; timers; the closing table."""
