"""Write a prompt file for the environments that make their own tasks.

python -m megatron_dapo.envs.prompts reasoning_gym --task chain_sum --size 1000 --output train.jsonl [key=value ...]
python -m megatron_dapo.envs.prompts household --size 1000 --output train.jsonl
python -m megatron_dapo.envs.prompts alfworld --games $ALFWORLD_DATA/json_2.1.1/train --output train.jsonl
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.envs import alfworld, household
from megatron_dapo.rewards import reasoning_gym

_HOW_TO_ANSWER = "\n\nGive the final answer, and nothing else, between <answer> and </answer>."


def reasoning_gym_rows(task: str, size: int, seed: int, config: dict[str, Any]) -> list[dict]:
    """Lines of a prompt file: `size` problems of a task. config: keys of the task's own. Raises UserError."""
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


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    try:
        rows = _ROWS[given.environment](given)
        if not rows:
            raise UserError(f"{given.environment}: there is no task to write; give another --size or --games.")
        write_whole(given.output, "".join(json.dumps(row) + "\n" for row in rows))
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    print(f"{given.output}: {len(rows)} prompts")
    return 0


_ROWS = {
    "reasoning_gym": lambda given: reasoning_gym_rows(given.task, given.size, given.seed, _config(given.config)),
    "household": lambda given: [household.row(given.seed + index) for index in range(given.size)],
    "alfworld": lambda given: alfworld.rows(given.games),
}


def _config(settings: list[str]) -> dict[str, Any]:
    """key=value with values in JSON; what is no JSON is text."""
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
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo.envs.prompts", description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="environment", required=True)
    for name in _ROWS:
        kind = kinds.add_parser(name)
        kind.add_argument("--output", type=Path, required=True, help="the .jsonl file")
        if name == "alfworld":
            kind.add_argument("--games", type=Path, required=True, help="folder of ALFWorld's data")
            continue
        kind.add_argument("--size", type=int, required=True, help="number of prompts")
        kind.add_argument("--seed", type=int, default=1, help="default 1")
        if name == "reasoning_gym":
            kind.add_argument("--task", required=True, help="name of the task, for example chain_sum")
            kind.add_argument("config", nargs="*", help="settings of the task, key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
