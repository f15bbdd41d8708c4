"""The demo's reward, a model for your own: `examples.arithmetic.reward:score` in the config."""


def is_right(response: str, answer: str) -> bool:
    """Compare the text after the last colon (without a colon: the whole response) with the ground
    truth."""
    return response.rpartition(":")[2].strip() == answer


def score(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float:
    """Return 1 for a right sum, and 0 for a wrong or missing one."""
    return float(is_right(response, ground_truth))
