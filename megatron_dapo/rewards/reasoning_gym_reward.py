"""The reward function `reasoning_gym`: the verdict of the package's own task, on a problem made
again from its seed.

Needs the package reasoning-gym. Importing this module does not import it.
"""

import json
import re
from functools import lru_cache
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.reward_result import Verdict

SOURCE_PREFIX = "reasoning_gym/"
_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
# the package takes every text for its answer, False or True
_COMPARED_AS_TEXT = ("game_of_life_halting",)
_RIGHT = 0.99  # tasks give credit for parts, and compute in floats


def reasoning_gym(
    data_source: str, response: str, ground_truth: str, extra_info: dict, *, partial_credit: bool = False
) -> Verdict:
    """Return 1 if the task of `reasoning_gym/TASK` judges the answer right, else 0.

    The answer is the last <answer>...</answer>, or without one the whole response.

    Args:
        extra_info: seed, size, index and config of the problem, written by
            `megatron_dapo.envs.prompts`.
        partial_credit: return the task's score instead.
    """
    score = answer_score(data_source, response, extra_info)
    right = score >= _RIGHT
    return {"score": score if partial_credit else float(right), "correct": right, "pred": _last_answer(response)}


def answer_score(data_source: str, response: str, extra_info: dict) -> float:
    """Return the task's own score, 0 to 1."""
    task = data_source.removeprefix(SOURCE_PREFIX)
    config = json.dumps(extra_info.get("config") or {}, sort_keys=True)
    tasks, problem = _problem(task, extra_info["seed"], extra_info["size"], config, extra_info["index"])
    answer = _last_answer(response)
    if task in _COMPARED_AS_TEXT:
        return float(answer.casefold() == str(problem["answer"]).casefold())
    try:
        return float(tasks.score_answer(answer, problem))
    except Exception:  # several tasks raise on text they cannot read: no answer
        return 0.0


def _last_answer(response: str) -> str:
    answers = _ANSWER.findall(response)
    return answers[-1] if answers else response.strip()


def create(task: str, seed: int, size: int, config: dict[str, Any]) -> Any:
    """Return the package's data set of `size` problems.

    Raises:
        UserError: if package, task or a key of config is unknown.
    """
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise UserError(
            f"data source {SOURCE_PREFIX}{task} needs the extra package reasoning-gym ({error}); install it with "
            f".venv/bin/python -m pip install -e '.[reasoning-gym]'."
        ) from error
    try:
        return create_dataset(task, seed=seed, size=size, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"reasoning-gym refuses task {task!r} with {config}: {error}; correct them.") from error


@lru_cache(maxsize=1024)
def _problem(task: str, seed: int, size: int, config: str, index: int) -> tuple[Any, dict]:
    """Return a task and one of its problems. config: in JSON, since some tasks' settings are
    lists."""
    tasks = create(task, seed, size, json.loads(config))
    return tasks, tasks[index]
