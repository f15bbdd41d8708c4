"""A tiny code task in verl's schema, with the scores of three programs by the reward `code_tests`.

python -m examples.code_tests.problems [FILE]      with FILE: also writes the prompt file
"""

import json
import sys
from pathlib import Path

from megatron_dapo.rewards.reward_registry import score_response

PROBLEMS = {
    "Read integers from one line and print their sum.": {"inputs": ["1 2 3\n", "-4 4\n"], "outputs": ["6\n", "0\n"]},
    "Write a function double(x) that returns 2 * x.": {"fn_name": "double", "inputs": ["4"], "outputs": ["8"]},
}
RESPONSES = {
    "right": "```python\nprint(sum(map(int, input().split())))\n```",
    "wrong": "```python\nprint(6)\n```",
    "forks for ever": "```python\nimport os\nwhile True:\n    os.fork()\n```",
}


def prompt_lines() -> list[str]:
    """Return the prompt file's lines."""
    return [
        json.dumps(
            {
                "data_source": "taco",
                "prompt": [{"role": "user", "content": f"{text} Answer with a block of Python."}],
                "reward_model": {"ground_truth": json.dumps(tests)},
            }
        )
        for text, tests in PROBLEMS.items()
    ]


def scores() -> dict[str, float]:
    """Return the score of each response to the first problem."""
    truth = json.dumps(next(iter(PROBLEMS.values())))
    return {
        name: score_response("code_tests", {}, "taco", response, truth, {}).score
        for name, response in RESPONSES.items()
    }


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text("".join(f"{line}\n" for line in prompt_lines()))
    for name, score in scores().items():
        print(f"{name:<16}{score:g}")
