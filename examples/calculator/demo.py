"""DAPO over several turns: a model learns to call a calculator, with the whole machinery on one CPU machine.

python -m examples.calculator.demo [key=value ...]
"""

import sys

from examples.cache import cache_folder
from examples.calculator import problems
from examples.calculator.pretrain import BASE
from examples.demo_run import Demo, config_path, prompt_files

DEMO = Demo(
    title="DAPO over two turns: a 0.6 M parameter Qwen2 over characters learns to call a calculator and not to guess.",
    config=config_path("calculator.yaml"),
    next_steps=(
        ("read what it writes now", "less {last}"),
        ("see the curves", ".venv/bin/tensorboard --logdir {run}/tensorboard"),
        ("write your own environment", "docs/multi_turn.md"),
    ),
)


def main(overrides: list[str]) -> int:
    files = problems.write_files(cache_folder() / "calculator")
    prepared = [*prompt_files(*files), f"actor_rollout_ref.model.path={BASE}"]
    return DEMO.run(prepared, overrides)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
