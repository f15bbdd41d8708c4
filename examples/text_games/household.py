"""A small household in ALFWorld's words: find an object, take it, put it into its place.

A game is made from a seed, the same everywhere; it can always be won. Complete in this file.
"""

import random
from dataclasses import dataclass, field

from megatron_dapo.envs.environment import Task
from megatron_dapo.envs.text_game import Scene, TextGameEnvironment

INSTRUCTIONS = (
    "You are in a household and have a task. In every turn think about what to do next, then write one of the "
    "admissible actions as <action>...</action>. Then you read what happened."
)
"""Beginning of a prompt; the game's own words follow from the environment."""

_CLOSED = ("cabinet", "drawer", "fridge")
_OPEN = ("countertop", "shelf", "diningtable", "sidetable")
_OBJECTS = ("apple", "book", "bowl", "cup", "fork", "mug", "plate", "potato", "spoon", "vase")


class Household(TextGameEnvironment):
    """Games of this file: the seed of a task is extra_info.seed, its size
    extra_info.num_receptacles (default 4)."""

    def __init__(self, show_commands: bool = True) -> None:
        super().__init__(game_of, show_commands)


def game_of(task: Task) -> "HouseholdGame":
    """Return the game of a row of the prompt file."""
    return HouseholdGame(int(task.extra_info["seed"]), int(task.extra_info.get("num_receptacles", 4)))


def row(seed: int, num_receptacles: int = 4) -> dict:
    """Return one line of a prompt file."""
    return {
        "data_source": "household",
        "prompt": [{"role": "system", "content": INSTRUCTIONS}],
        # rows with equal prompt and truth are duplicates to a data set: the seed keeps games apart
        "reward_model": {"ground_truth": f"{HouseholdGame(seed, num_receptacles).goal} (game {seed})"},
        "extra_info": {"seed": seed, "num_receptacles": num_receptacles},
    }


@dataclass
class _Receptacle:
    name: str
    closes: bool
    is_open: bool
    objects: list[str] = field(default_factory=list)


class HouseholdGame:
    """Receptacles with objects, some of them closed; one object must go to one receptacle.

    The player carries one object at a time.
    """

    def __init__(self, seed: int, num_receptacles: int) -> None:
        draw = random.Random(f"household/{seed}/{num_receptacles}")
        names: list[str] = []
        for index in range(num_receptacles):
            kind = draw.choice(_CLOSED if index % 2 else _OPEN)
            names.append(f"{kind} {1 + sum(name.startswith(kind) for name in names)}")
        closed = {name: name.startswith(_CLOSED) for name in names}
        self._places = {name: _Receptacle(name, closes, is_open=not closes) for name, closes in closed.items()}
        self._target, kinds = draw.choice(names), draw.sample(_OBJECTS, num_receptacles)
        elsewhere = [name for name in names if name != self._target]
        self._wanted = f"{kinds[0]} 1"
        for index, kind in enumerate(kinds):
            self._places[draw.choice(elsewhere if index == 0 else names)].objects.append(f"{kind} 1")
        self._at: str | None = None
        self._carried: str | None = None

    @property
    def goal(self) -> str:
        return f"put the {self._wanted} in {self._target}"

    def reset(self) -> Scene:
        seen = _listed(self._places)
        return self._scene(f"{_ROOM} you see {seen}.\n\nYour task is to: {self.goal}.")

    def step(self, command: str) -> Scene:
        return self._scene(self._effect(command) if command in self._commands() else "Nothing happens.")

    def close(self) -> None:
        """Nothing is open."""

    def _effect(self, command: str) -> str:
        if command == "look":
            return self._around()
        if command == "inventory":
            return f"You are carrying: {f'a {self._carried}' if self._carried else 'nothing'}."
        verb, _, rest = command.partition(" ")
        if verb == "go":
            self._at = rest.removeprefix("to ")
            return f"You arrive at {self._at}. {self._contents()}"
        place = self._places[self._at]
        if verb in ("open", "close"):
            place.is_open = verb == "open"
            return f"You {verb} the {place.name}. {self._contents()}"
        if verb == "take":
            self._carried = rest.partition(" from ")[0]
            place.objects.remove(self._carried)
            return f"You pick up the {self._carried} from the {place.name}."
        moved, self._carried = self._carried, None
        place.objects.append(moved)
        return f"You move the {moved} to the {place.name}."

    def _commands(self) -> tuple[str, ...]:
        """Return the commands possible now, in ALFWorld's words."""
        commands = ["look", "inventory", *(f"go to {name}" for name in self._places if name != self._at)]
        if self._at is None:
            return tuple(commands)
        place = self._places[self._at]
        if place.closes:
            commands.append(f"{'close' if place.is_open else 'open'} {place.name}")
        if place.is_open:
            commands += [f"take {thing} from {place.name}" for thing in place.objects if self._carried is None]
            commands += [f"move {self._carried} to {place.name}"] if self._carried else []
        return tuple(commands)

    def _contents(self) -> str:
        place = self._places[self._at]
        if not place.is_open:
            return f"The {place.name} is closed."
        seen = _listed(place.objects) or "nothing"
        where = f"The {place.name} is open. In it" if place.closes else f"On the {place.name}"
        return f"{where}, you see {seen}."

    def _around(self) -> str:
        if self._at is None:
            return f"{_ROOM} you see {_listed(self._places)}."
        return f"You are facing the {self._at}. {self._contents()}"

    def _scene(self, text: str) -> Scene:
        return Scene(text, self._commands(), won=self._wanted in self._places[self._target].objects)


_ROOM = "You are in the middle of a room. Looking quickly around you,"


def _listed(names) -> str:
    """ "a mug 1, and a plate 1": ALFWorld's way of counting up."""
    words = [f"a {name}" for name in names]
    return ", ".join([*words[:-1], f"and {words[-1]}"]) if len(words) > 1 else "".join(words)
