"""The reward of the calculator example: the whole trajectory's text, tool results included, comes in."""


def score(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float:
    """Return 1 if the text after the last tool result (or, without one, the whole response) is the product; else 0."""
    return float(response.rpartition(";")[2] == ground_truth)
