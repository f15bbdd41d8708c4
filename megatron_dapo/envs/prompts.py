"""Write a prompt file of reasoning-gym's problems.

python -m megatron_dapo.envs.prompts reasoning_gym --task chain_sum --size 1000 --output train.jsonl
[key=value ...]
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.rewards import reasoning_gym_reward as reasoning_gym

_HOW_TO_ANSWER = "\n\nGive the final answer, and nothing else, between <answer> and </answer>."


def reasoning_gym_rows(task: str, size: int, seed: int, config: dict[str, Any]) -> list[dict]:
    """Return the lines of a prompt file: `size` problems of a task. config: keys of the task's own.
    Raises UserError."""
    tasks = reasoning_gym.create(task, seed, size, config)
    return [
        {
            "data_source": f"{reasoning_gym.SOURCE_PREFIX}{task}",
            "prompt": [{"role": "user", "content": problem["question"] + _HOW_TO_ANSWER}],
            "reward_model": {"ground_truth": str(problem["answer"])},
            "extra_info": {"seed": seed, "size": size, "index": index, "config": config},
        }
        for index, problem in enumerate(tasks)
    ]


def write_prompt_file(path: Path, make_rows: Callable[[], list[dict]]) -> int:
    """Write rows to a .jsonl file, or say why there are none. Returns the exit code of a program
    that does so."""
    try:
        rows = make_rows()
        if not rows:
            raise UserError(f"{path}: there is no task to write; give other options.")
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    print(f"{path}: {len(rows)} prompts")
    return 0


def main(arguments: list[str]) -> int:
    """Write the file that the command line asks for; return the exit code."""
    options = _parser().parse_args(arguments)
    return write_prompt_file(
        options.output,
        lambda: reasoning_gym_rows(options.task, options.size, options.seed, _config(options.config)),
    )


def _config(settings: list[str]) -> dict[str, Any]:
    """Return key=value arguments as a dictionary. Values are JSON; any other value is text."""
    config = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"{setting!r} is not of the form key=value.")
        try:
            config[key] = json.loads(value)
        except ValueError:
            config[key] = value
    return config


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo.envs.prompts", description=description)
    kind = parser.add_subparsers(dest="environment", required=True).add_parser("reasoning_gym")
    kind.add_argument("--output", type=Path, required=True, help="the .jsonl file")
    kind.add_argument("--size", type=int, required=True, help="number of prompts")
    kind.add_argument("--seed", type=int, default=1, help="default 1")
    kind.add_argument("--task", required=True, help="name of the task, for example chain_sum")
    kind.add_argument("config", nargs="*", help="settings of the task, key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
