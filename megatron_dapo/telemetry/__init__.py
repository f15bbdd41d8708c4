"""Metrics and where they go: console, metrics.jsonl, TensorBoard, W&B; timers; the closing table.

Import from here: `Telemetry` (rank 0), `NullTelemetry` (the others), `performance`, `read_metrics`, `Summary`,
`closing_table`.
"""

from megatron_dapo.telemetry import performance
from megatron_dapo.telemetry.report import Summary, closing_table, read_metrics
from megatron_dapo.telemetry.telemetry import NullTelemetry, Telemetry

__all__ = ["NullTelemetry", "Summary", "Telemetry", "closing_table", "performance", "read_metrics"]
