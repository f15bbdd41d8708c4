"""Reward of the products example: the last number of the response is its answer."""

import re

NUMBER = re.compile(r"\d+(?:,\d{3})*")


def last_number(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float:
    """Return 1 if the last whole number of the response equals the ground truth, otherwise 0."""
    numbers = NUMBER.findall(response)
    return float(bool(numbers) and numbers[-1].replace(",", "") == ground_truth)
