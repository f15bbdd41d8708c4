"""DAPO over several turns on one CPU machine: a model learns to call a calculator.

python -m examples.calculator.demo [key=value ...]
"""

import sys

from examples.calculator.pretrain import BASE
from examples.calculator.problems import write_files
from examples.demo_run import Demo

DEMO = Demo(
    title="DAPO over two turns: a 0.6 M parameter Qwen2 over characters learns to call a calculator and not to guess.",
    config="calculator.yaml",
    files=write_files,
    model=lambda: BASE,
    next_steps=(("write your own environment", "docs/multi_turn.md"),),
)

if __name__ == "__main__":
    sys.exit(DEMO.run(sys.argv[1:]))
