"""The comparison with experience replay and without: its arms, its base model's habits, its plot, what it found."""

import random
import xml.etree.ElementTree as ElementTree

import pytest

from examples.arithmetic.problems import split
from examples.arithmetic.reward import is_right
from examples.experience_replay import reluctant
from examples.experience_replay.compare import ARMS, GOAL, first_passed, table
from examples.experience_replay.plot import STYLES, draw
from megatron_dapo.config import load_config, uses_experience_replay, validate

pytestmark = pytest.mark.unit

CURVES = {"with replay": {"1": [[0, 0.0], [10, 1.0]]}, "without replay": {"1": [[0, 0.5], [10, 0.5]]}}
RESULTS_OF_ONE_SEED = {"goal": GOAL, "curves": CURVES}


def test_the_arms_differ_in_replay_alone():
    without, with_replay = (load_config("configs/experience_replay.yaml", ARMS[arm]) for arm in reversed(STYLES))
    for config in (without, with_replay):
        validate(config, None, check_files=False)
    assert uses_experience_replay(with_replay) and not uses_experience_replay(without)
    assert without.model_copy(update={"exp_manager": with_replay.exp_manager}) == with_replay


def test_six_demonstrations_of_100_work_a_sum_out_and_the_others_are_wrong_or_none():
    settings, (problems, _) = reluctant.Settings(), split()
    answers = {problem.prompt: problem.answer for problem in problems}
    chance, shown = random.Random(0), 4000
    demonstrations = [reluctant.demonstration(settings, problems, chance) for _ in range(shown)]
    share = sum(is_right(text, answers[prompt]) for prompt, text in demonstrations) / shown
    assert share == pytest.approx(0.06, abs=0.015)  # four deviations: 4 * sqrt(0.06 * 0.94 / 4000)


def test_the_plot_has_every_seed_and_the_mean_at_their_places():
    every = list(ElementTree.fromstring(draw(RESULTS_OF_ONE_SEED)).iter("{http://www.w3.org/2000/svg}polyline"))
    points = {arm: [x.get("points") for x in every if x.get("stroke") == colour] for arm, (colour, _) in STYLES.items()}
    assert points == {
        "with replay": ["64.0,348.0 696.0,44.0"] * 2,
        "without replay": ["64.0,196.0 696.0,196.0"] * 2,
    }


def test_the_table_names_the_first_step_above_the_goal():
    assert first_passed([(0, 0.1), (5, 0.5), (10, 0.51), (15, 0.4)]) == 10
    assert first_passed([(0, 0.1), (5, 0.5)]) is None
    assert [line.split()[-1] for line in table(RESULTS_OF_ONE_SEED).splitlines()[1:]] == ["10", "-"]
