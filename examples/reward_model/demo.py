"""DAPO on two-digit sums with a reward model beside the rule: it prefers brief responses.

python -m examples.reward_model.demo [key=value ...]
"""

import sys

from examples.arithmetic.demo import DEMO
from examples.cache import cache_folder
from examples.demo_run import Demo
from examples.reward_model.brevity import make

EXAMPLE = Demo(
    title="DAPO on two-digit sums; the reward is the rule's, and half of what a reward model gives for brevity.",
    config="demo.yaml",
    files=DEMO.files,
    model=DEMO.model,
    next_steps=(
        ("the model alone", ".venv/bin/python -m examples.reward_model.demo reward.combine=model"),
        ("without it", "make demo"),
    ),
)


def overrides() -> list[str]:
    """Return the reward model's keys, and the run's name and length."""
    model = make(cache_folder() / "brevity")
    return [
        "trainer.experiment_name=reward_model",
        "trainer.total_training_steps=20",
        f"reward.model.path={model}",
        "reward.model.weight=0.5",
    ]


if __name__ == "__main__":
    sys.exit(EXAMPLE.run([*overrides(), *sys.argv[1:]]))
