"""The text games of the examples: a small household,
and ALFWorld's engine in front of a stand-in."""

import json
import sys
from collections import deque

import pytest

from examples.text_games import prompts
from examples.text_games.household import Household, HouseholdGame, row
from megatron_dapo.common.errors import UserError
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.envs.environment import Task
from megatron_dapo.envs.environment_registry import make
from tests.unit.test_environments import play
from tests.unit.test_tokenizer import write_byte_level

pytestmark = pytest.mark.unit

ALFWORLD = "examples.text_games.alfworld:Alfworld"


def solve(game):
    """The commands of a shortest way to win, by search from the start over all admissible ones."""
    first = game().reset()
    queue, seen = deque([((), first)]), {first.text}
    while queue:
        commands, scene = queue.popleft()
        for command in scene.commands:
            if command in ("look", "inventory"):
                continue
            played = game()
            played.reset()
            for earlier in commands:
                played.step(earlier)
            after = played.step(command)
            if after.won:
                return [*commands, command]
            state = (after.text, after.commands, tuple(sorted(_all_objects(played))))
            if state not in seen and len(commands) < 8:
                seen.add(state)
                queue.append(([*commands, command], after))
    return None


def _all_objects(game):
    return [f"{place.name}:{thing}" for place in game._places.values() for thing in place.objects]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_household_game_can_be_won_and_pays_once(seed):
    commands = solve(lambda: HouseholdGame(seed, 2))
    assert commands, "no way to win"
    task = Task("", "household", "", {"seed": seed, "num_receptacles": 2})
    opening, *observations = play(Household(), task, *(f"I think.\n<action>{c}</action>" for c in commands))
    assert "Your task is to: put the" in opening.messages[0]["content"]
    assert "Admissible actions: look, inventory, go to" in opening.messages[0]["content"]
    assert [seen.reward for seen in observations] == [0.0] * (len(commands) - 1) + [1.0]
    assert [seen.done for seen in observations] == [False] * (len(commands) - 1) + [True]
    assert observations[-1].correct is True


def test_household_speaks_alfworlds_words():
    game = HouseholdGame(seed=4, num_receptacles=4)
    assert game.reset().text.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
    assert game.step("dance").text == "Nothing happens."
    closed = next(c for c in game.reset().commands if c.startswith(("go to cabinet", "go to drawer", "go to fridge")))
    name = closed.removeprefix("go to ")
    assert game.step(closed).text == f"You arrive at {name}. The {name} is closed."
    assert game.step(f"open {name}").text.startswith(f"You open the {name}. The {name} is open. In it, you see ")
    assert HouseholdGame(4, 4).goal == game.goal


def test_alfworld_without_its_package_is_told_the_extra_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[alfworld\]'") as caught:
        make(ALFWORLD, {})
    assert len(caught.value.sentences) == 1


def test_alfworld_plays_the_engine_it_is_given(monkeypatch):
    """The engine is a stand-in with TextWorld's interface: state dictionaries,
    (state, score, done)."""
    import types

    class Engine:
        def __init__(self, path):
            self.path, self.closed = path, False

        def reset(self):
            text = "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.\n\nYour task is to: win."
            return {"feedback": text, "won": False, "admissible_commands": ["win", "help"]}

        def step(self, command):
            won = command == "win"
            return {"feedback": "Nothing happens.", "won": won, "admissible_commands": ["win"]}, int(won), won

        def close(self):
            self.closed = True

    engines = []
    textworld = types.ModuleType("textworld")
    textworld.EnvInfos = lambda **wanted: wanted
    textworld.start = lambda path, infos, wrappers: engines.append(Engine(path)) or engines[-1]
    wrapper = types.ModuleType("alfred_tw_env")
    wrapper.AlfredDemangler = object
    monkeypatch.setitem(sys.modules, "textworld", textworld)
    for name in ("alfworld", "alfworld.agents", "alfworld.agents.environment"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "alfworld.agents.environment.alfred_tw_env", wrapper)

    task = Task("", "alfworld", "", {"game_file": "somewhere/game.tw-pddl"})
    opening, nothing, won = play(make(ALFWORLD, {}), task, "<action>sit</action>", "<action>win</action>")
    text = "You are in the middle of a room.\n\nYour task is to: win.\nAdmissible actions: win."
    assert opening.messages == ({"role": "user", "content": text},)
    assert (nothing.done, nothing.reward, won.done, won.reward, won.correct) == (False, 0.0, True, 1.0, True)
    assert engines[-1].path == "somewhere/game.tw-pddl" and engines[-1].closed


def test_prompt_files_of_games_keep_every_game_in_the_data_set(tmp_path, capsys):
    for task in ("pick_and_place-Mug/trial_1", "pick_and_place-Mug/trial_2", "pick_movable/trial_3"):
        (tmp_path / "train" / task).mkdir(parents=True)
        (tmp_path / "train" / task / "game.tw-pddl").write_text("{}")
    games, household = tmp_path / "games.jsonl", tmp_path / "household.jsonl"
    assert prompts.main(["alfworld", "--games", str(tmp_path / "train"), "--output", str(games)]) == 0
    assert prompts.main(["household", "--size", "50", "--output", str(household)]) == 0
    files = [json.loads(line)["extra_info"]["game_file"] for line in games.read_text().splitlines()]
    assert [file.rpartition("Mug/")[2] for file in files] == [
        "trial_1/game.tw-pddl",
        "trial_2/game.tw-pddl",
    ]  # as they do
    assert [json.loads(line) for line in household.read_text().splitlines()] == [row(seed) for seed in range(1, 51)]
    tokenizer = load_tokenizer(write_byte_level(tmp_path))
    for path, num_games in ((games, 2), (household, 50)):
        loaded = PromptDataset.load([str(path)], "prompt", tokenizer, 1000, conflicting_answers="keep")  # multi-turn
        assert len(loaded.prompts) == num_games
        assert loaded.prompts[0].messages == json.loads(path.read_text().splitlines()[0])["prompt"]
    assert prompts.main(["alfworld", "--games", str(tmp_path / "none"), "--output", str(games)]) == 2
    assert "there is no task to write" in capsys.readouterr().err
