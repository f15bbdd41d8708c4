"""ALFWorld's household tasks (arXiv 2010.03768) as text games.

Needs the package alfworld and its downloaded games.
"""

from pathlib import Path
from typing import Any

from examples.text_games.household import INSTRUCTIONS
from megatron_dapo.common.errors import UserError
from megatron_dapo.envs.text_game import Scene, TextGameEnvironment

_BANNER = "-= Welcome to TextWorld, ALFRED! =-"
GAME_FILE = "game.tw-pddl"
_UNSUPPORTED = ("movable", "Sliced")  # in the path of games left out by ALFWorld itself


class Alfworld(TextGameEnvironment):
    """ALFWorld's games by their files: extra_info.game_file of a task.

    Raises UserError if the package is not installed.
    """

    def __init__(self, show_commands: bool = True) -> None:
        _packages()
        super().__init__(lambda task: AlfworldGame(task.extra_info["game_file"]), show_commands)


class AlfworldGame:
    """One game file in the TextWorld engine, with ALFWorld's readable names of objects."""

    def __init__(self, game_file: str) -> None:
        textworld, demangler = _packages()
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._engine = textworld.start(game_file, infos, wrappers=[demangler])

    def reset(self) -> Scene:
        return _scene(self._engine.reset(), over=False)

    def step(self, command: str) -> Scene:
        state, _, done = self._engine.step(command)
        return _scene(state, done)

    def close(self) -> None:
        self._engine.close()


def _scene(state: Any, over: bool) -> Scene:
    text = state["feedback"].replace(_BANNER, "")
    commands = tuple(command for command in state["admissible_commands"] if command != "help")
    return Scene(text, commands, won=bool(state["won"]), over=over)


def _packages() -> tuple[Any, Any]:
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        raise UserError(
            f"actor_rollout_ref.rollout.multi_turn.environment: {__name__} needs the extra package alfworld ({error}); "
            f"install it with .venv/bin/python -m pip install -e '.[alfworld]', or use "
            f"examples.text_games.household:Household."
        ) from error
    return textworld, AlfredDemangler


def rows(data: Path) -> list[dict]:
    """Return the lines of a prompt file for every game below a folder of ALFWorld's data, such as
    json_2.1.1/train."""
    files = sorted(path for path in data.rglob(GAME_FILE) if not any(word in str(path) for word in _UNSUPPORTED))
    return [
        {
            "data_source": "alfworld",
            "prompt": [{"role": "system", "content": INSTRUCTIONS}],
            # Rows with equal prompt and truth are duplicates to a data set: the trial keeps games
            # apart.
            "reward_model": {"ground_truth": f"{path.parent.parent.name}/{path.parent.name}"},
            "extra_info": {"game_file": str(path)},
        }
        for path in files
    ]
