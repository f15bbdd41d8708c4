"""`make demo`: DAPO on two-digit sums, with the whole machinery on one CPU machine.

python -m examples.arithmetic.demo [key=value ...]
"""

import sys

from examples.arithmetic.problems import BASE, write_files
from examples.demo_run import Demo

DEMO = Demo(
    title="DAPO on two-digit sums: a 0.6 M parameter Qwen2 over characters learns to work them out digit by digit.",
    config="demo.yaml",
    files=write_files,
    model=lambda: BASE,
    next_steps=(
        (
            "switch a technique off",
            ".venv/bin/python -m examples.arithmetic.demo algorithm.dynamic_sampling.enable=false",
        ),
        ("train a real language model", "make demo-llm"),
        ("use your own data and reward", "README.md, 'Your own data and reward'"),
    ),
)

if __name__ == "__main__":
    sys.exit(DEMO.run(sys.argv[1:]))
