"""The demo's reward, hanging at the first scored response."""

import time
from pathlib import Path

from examples.arithmetic.reward import score as demo_score


def score(data_source: str, response: str, ground_truth: str, extra_info: dict, has_hung: str):
    """has_hung: a file that says so."""
    if not Path(has_hung).exists():
        Path(has_hung).touch()
        time.sleep(3600)
    return demo_score(data_source, response, ground_truth, extra_info)
