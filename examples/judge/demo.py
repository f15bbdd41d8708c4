"""DAPO on two-digit sums with a judge beside the rule: it gives something for each right digit.

python -m examples.judge.demo [key=value ...]
"""

import json
import os
import secrets
import socket
import subprocess
import sys

from examples.arithmetic.demo import DEMO
from examples.demo_run import Demo
from examples.judge.endpoint import KEY, PROMPT

EXAMPLE = Demo(
    title="DAPO on two-digit sums; the reward is the rule's, and up to 0.5 of a judge's for right digits.",
    config="demo.yaml",
    files=DEMO.files,
    model=DEMO.model,
    next_steps=(
        ("a judge of your own", "reward.judge.url=http://HOST:PORT/v1 (docs/rewards.md)"),
        ("without it", "make demo"),
    ),
)


def overrides(port: int) -> list[str]:
    """Return the judge's keys, and the run's name and length."""
    return [
        "trainer.experiment_name=judge",
        "trainer.total_training_steps=20",
        f"reward.judge.url=http://127.0.0.1:{port}/v1",
        f"reward.judge.api_key_env={KEY}",
        f"reward.judge.prompt={json.dumps(PROMPT)}",
        "reward.judge.weight=0.05",
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def main() -> int:
    """Start the endpoint, train, and end it; return the run's exit code."""
    os.environ[KEY] = secrets.token_urlsafe(16)
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", "examples.judge.endpoint", str(port)]) as endpoint:
        try:
            return EXAMPLE.run([*overrides(port), *sys.argv[1:]])
        finally:
            endpoint.terminate()


if __name__ == "__main__":
    sys.exit(main())
