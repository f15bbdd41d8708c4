"""The comparison with and without experience replay: its arms, base model, plot and findings."""

import json
import random
import xml.etree.ElementTree as ElementTree

import pytest

from examples.arithmetic.problems import split
from examples.arithmetic.reward import is_right
from examples.cache import ROOT
from examples.character_model import demonstration
from examples.experience_replay import guesser
from examples.experience_replay.compare import ARMS, GOAL, PLOT, RESULTS, first_passed, table
from examples.experience_replay.plot import STYLES, draw
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.config.derived import uses_experience_replay
from megatron_dapo.config.loader import load_config

pytestmark = pytest.mark.unit

CURVES = {"with replay": {"1": [[0, 0.0], [10, 1.0]]}, "without replay": {"1": [[0, 0.5], [10, 0.5]]}}
RESULTS_OF_ONE_SEED = {"goal": GOAL, "curves": CURVES}


def test_the_arms_differ_in_replay_alone():
    without, with_replay = (load_config("configs/experience_replay.yaml", ARMS[arm]) for arm in reversed(STYLES))
    for config in (without, with_replay):
        validate(config, None, check_files=False)
    assert uses_experience_replay(with_replay) and not uses_experience_replay(without)
    assert without.model_copy(update={"exp_manager": with_replay.exp_manager}) == with_replay


def test_one_guess_in_twenty_is_right():
    problems, chance, shown = split()[0], random.Random(0), 4000
    demonstrations = [demonstration(guesser.SETTINGS, guesser.GUESSES, problems, chance) for _ in range(shown)]
    share = sum(is_right(text, problem.answer) for problem, ((_, text),) in demonstrations) / shown
    assert share == pytest.approx(0.05, abs=0.014)  # four deviations: 4 * sqrt(0.05 * 0.95 / 4000)


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


def test_the_committed_comparison_passes_the_goal_sooner_with_replay_for_each_of_three_seeds():
    committed = json.loads(RESULTS.read_text())
    curves = committed["curves"]
    assert curves["with replay"].keys() == curves["without replay"].keys() == {"1", "2", "3"}
    assert committed["settings"]["overrides"] == []
    for arm in curves.values():
        assert all(curve[0][1] < 0.1 for curve in arm.values()), "rare at the start"
    for seed, with_replay in curves["with replay"].items():
        without = first_passed(curves["without replay"][seed])
        assert first_passed(with_replay) is not None
        assert without is None or first_passed(with_replay) < without
    assert PLOT.read_text() == draw(committed)
    page = (ROOT / "docs" / "experience_replay.md").read_text()
    assert "\n".join(f"    {line}" for line in table(committed).splitlines()) in page
