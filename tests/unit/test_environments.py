"""The shipped environments: what they answer, and that every one of them can be made by name."""

import asyncio
import json
import sys
from collections import deque

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.multi_turn_checks import BUILT_IN_ENVIRONMENTS
from megatron_dapo.data.prompts import PromptDataset
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.envs import prompts
from megatron_dapo.envs.calculator import Calculator, calculate
from megatron_dapo.envs.household import Household, HouseholdGame, row
from megatron_dapo.envs.registry import ENVIRONMENTS, check_environment, make
from megatron_dapo.envs.text_game import command_of
from megatron_dapo.envs.types import Observation, Task
from tests.unit.test_tokenizer import write_byte_level

pytestmark = pytest.mark.unit


def play(environment, task, *responses):
    """The observations to reset and to each response."""

    async def scenario():
        seen = [await environment.reset(task)]
        for response in responses:
            seen.append(await environment.step(response))
        await environment.close()
        return seen

    return asyncio.run(scenario())


TASK = Task("12*34?", "calculator", "408")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" -(2 + 3) * 4 ", "-20"),
        ("7//2 + 7%4", "6"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),  # exact, not binary
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("10**20/10**19", "10"),
    ],
)
def test_the_calculator_computes_exactly(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "2+", "9**9**9", "__import__('os')", "a+1", "1 if 1 else 2", "(1).real", "'a'*9", "2**0.5", "9" * 201, "True"],
)
def test_the_calculator_refuses_everything_else_at_once(expression):
    with pytest.raises((ValueError, ArithmeticError)):
        calculate(expression)


def test_a_tool_call_is_answered_and_a_turn_without_one_ends_the_trajectory():
    call = 'Let me see. <tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>'
    _, answered, ended = play(Calculator(), TASK, call, "It is 408.")
    assert answered == Observation(({"role": "tool", "content": "408"},))
    assert ended == Observation(done=True)


def test_calls_can_be_written_in_other_marks_and_words():
    environment = Calculator(call_open="(", call_close=")", result="={};", role="user")
    _, answered = play(environment, TASK, "(12*34) (1+1")
    assert [message["content"] for message in answered.messages] == ["=408;", "=2;"]
    assert {message["role"] for message in answered.messages} == {"user"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"name": "search", "arguments": {}}', "no tool 'search'; there is calculator"),
        ('{"name": "calculator", "arguments": {"query": "1"}}', "query"),
        ('{"name": "calculator", "arguments": 3}', "JSON object"),
        ('{"name": ', "Expecting value"),
        ("1/0", "zero"),
        ("x", "only numbers"),
    ],
)
def test_a_bad_call_is_told_to_the_model(call, words):
    _, answered = play(Calculator(), TASK, f"<tool_call>{call}</tool_call>")
    (message,) = answered.messages
    assert message["content"].startswith("error: ") and words in message["content"]


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


@pytest.mark.parametrize(
    ("response", "command"),
    [
        ("<action>go to shelf 1</action>", "go to shelf 1"),
        ("first <action>look</action>, no: <action> go to shelf 1\n</action>", "go to shelf 1"),
        ("I will look.\n> go to shelf 1\n\n", "go to shelf 1"),
        ("", ""),
    ],
)
def test_the_last_action_of_a_turn_is_taken(response, command):
    assert command_of(response) == command


def test_the_names_of_the_config_are_those_of_the_table():
    assert set(BUILT_IN_ENVIRONMENTS) == set(ENVIRONMENTS)
    with pytest.raises(UserError, match="Did you mean 'calculator'"):
        check_environment("calculater")


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("no_such_package:Thing", {}, "cannot import 'no_such_package:Thing'"),
        ("calculator", {"marker": "x"}, "calculator cannot be made with environment_kwargs {'marker': 'x'}"),
        ("calculator", {"call_open": ""}, "call_open and call_close need text"),
    ],
)
def test_an_environment_that_cannot_be_made_is_told(name, kwargs, words):
    with pytest.raises(UserError, match="multi_turn.environment") as caught:
        make(name, kwargs)
    assert words in str(caught.value)


def test_alfworld_without_its_package_is_told_the_extra_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[alfworld\]'") as caught:
        make("alfworld", {})
    assert len(caught.value.sentences) == 1


def test_alfworld_plays_the_engine_it_is_given(monkeypatch):
    """The engine is a stand-in with TextWorld's interface: state dictionaries, (state, score, done)."""
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
    opening, nothing, won = play(make("alfworld", {}), task, "<action>sit</action>", "<action>win</action>")
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
