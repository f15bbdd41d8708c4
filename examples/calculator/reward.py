"""The reward of the calculator example, on the whole trajectory's text with the tool's results."""


def score(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float:
    """Return 1 for the product after the last tool result, or as the whole response; else 0."""
    return float(response.rpartition(";")[2] == ground_truth)
