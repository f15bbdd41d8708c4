"""Metrics and their sinks: console, metrics.jsonl, TensorBoard, W&B, MLflow; timers; closing
table."""
