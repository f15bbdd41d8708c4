"""A kept answer, as `eval` and a run's validation write it."""

ANSWER = {
    "step": 1,
    "data_source": "aime",
    "prompt_index": 0,
    "prompt_key": "k0",
    "number": 0,
    "prompt": "p0",
    "ground_truth": "right",
    "text": "right",
    "reward": 1.0,
    "raw_reward": 1.0,
    "correct": True,
    "answer": None,
    "finish_reason": "stop",
    "num_tokens": 2,
    "weight_versions": [1],
}
