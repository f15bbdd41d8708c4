"""Small repositories with a fault, for mini-swe-agent: prompts, and tests that the agent never sees.

    python -m examples.agents.repairs --output repairs.jsonl

The user's message has the issue and the files; ground_truth is for the reward `code_tests`.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_dapo.envs.prompts import write_prompt_file

FILE_MARK = "=== {} ==="
MODULE, TEST = "solution.py", "test_solution.py"

# name, its lines with {} for the fault, (right, wrong) of the fault, calls with results
FUNCTIONS = (
    ("add", "def add(a, b):\n    return a {} b\n", ("+", "-"), {"add(2, 3)": 5, "add(0, 4)": 4}),
    ("largest", "def largest(xs):\n    return {}(xs)\n", ("max", "min"), {"largest([1, 7, 3])": 7, "largest([5])": 5}),
    ("is_even", "def is_even(n):\n    return n % 2 == {}\n", ("0", "1"), {"is_even(4)": True, "is_even(7)": False}),
    ("last", "def last(xs):\n    return xs[{}]\n", ("-1", "0"), {"last([1, 2, 3])": 3, "last('ab')": "b"}),
    ("mean", "def mean(xs):\n    return sum(xs) / {}\n", ("len(xs)", "2"), {"mean([3, 6, 9])": 6.0, "mean([1])": 1.0}),
    ("reverse", "def reverse(s):\n    return s[{}]\n", ("::-1", "1:"), {"reverse('abc')": "cba", "reverse('')": ""}),
)


def rows() -> Iterator[dict]:
    """Yield one row for each function, in verl's schema."""
    for index, (name, lines, (_, wrong), results) in enumerate(FUNCTIONS):
        asserts = [f"assert {call} == {result!r}" for call, result in results.items()]
        test = f"from solution import {name}\n\n{asserts[0]}\n"
        files = {MODULE: lines.format(wrong), TEST: test}
        issue = f"{name}() in {MODULE} is wrong: `python {TEST}` fails. Repair {MODULE}, and leave the test alone."
        text = "\n".join([issue, *(f"{FILE_MARK.format(path)}\n{content}" for path, content in files.items())])
        yield {
            "data_source": "repairs",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps({"assert_case": asserts})},
            "extra_info": {"index": index},
        }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.agents.repairs", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file")
    return write_prompt_file(parser.parse_args(arguments).output, lambda: list(rows()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
