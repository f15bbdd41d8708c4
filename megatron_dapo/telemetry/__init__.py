"""Metrics and where they go: console, metrics.jsonl, TensorBoard, W&B; timers; the closing table."""
