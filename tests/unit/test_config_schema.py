"""The JSON schema of a config: current, named by every recipe, and never stricter than the
loader."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from pydantic import ValidationError

from megatron_dapo.__main__ import main
from megatron_dapo.config.aliases import ALIASES, FILTER_GROUPS, MAIN_SWITCH
from megatron_dapo.config.json_schema import config_schema
from megatron_dapo.config.keys import known_keys, known_sections
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.yaml_dialect import parse_yaml

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.rglob("*.yaml"))
SCHEMA = json.loads(config_schema())
VALIDATOR = Draft7Validator(SCHEMA)


def tree_of(name: str, value: object) -> dict:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def test_the_schema_beside_the_recipes_is_current_and_printed(capsys):
    file = (CONFIGS / "schema.json").read_text(encoding="utf-8")
    assert file == config_schema(), "run: python -m megatron_dapo config-schema > configs/schema.json"
    assert main(["config-schema"]) == 0 and capsys.readouterr().out == file
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_names_the_schema_and_is_valid(path):
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == CONFIGS / "schema.json"
    assert [error.message for error in VALIDATOR.iter_errors(parse_yaml(text)[0])] == []


def test_the_config_that_a_run_saves_is_valid():
    assert VALIDATOR.is_valid(parse_yaml(to_yaml(Config()))[0])


VALUES = [None, True, False, -1, 0, 1, 7, 10**12, 0.5, -0.5, 1.5, "", "x", [], ["x"], [0.9, 0.99], [1], {}, {"a": 1}]


def test_each_value_that_the_loader_takes_is_valid_and_hardly_any_other():
    """A whole number may be written 1.0 in JSON; values are in range by themselves only."""
    looser = []
    for key in known_keys().values():
        literals = [literal for literal in key.allowed.removeprefix("one of ").split(", ") if " " not in literal]
        for value in [*VALUES, *literals]:
            tree = tree_of(key.name, value)
            try:
                Config.model_validate(tree)
                is_taken = True
            except ValidationError:
                is_taken = False
            is_valid = VALIDATOR.is_valid(tree)
            assert is_valid or not is_taken, (key.name, value)
            looser += [(key.name, value)] if is_valid and not is_taken else []
    assert looser == []


def test_other_spellings_empty_sections_and_dotted_names_are_valid():
    for alias, key in (ALIASES | FILTER_GROUPS).items():
        value = None if key in known_sections() else known_keys()[key].default
        assert VALIDATOR.is_valid(tree_of(alias, value)), alias
    assert VALIDATOR.is_valid(tree_of(MAIN_SWITCH, True)) and VALIDATOR.is_valid({"extends": "demo.yaml"})
    assert VALIDATOR.is_valid({"trainer.seed": 2, "actor": {"optim.lr": 1e-6}})
    for section in filter(None, known_sections()):
        assert VALIDATOR.is_valid(tree_of(section, None))


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {sead: 1}",
        "actr: {}",
        "data: 3",
        "trainer: {seed: one}",
        "actor: {optim: {lr: -1e-6}}",
        "actor: {optim: {betas: [0.9, 0.99, 0.999]}}",
        "actor: {loss_agg_mode: mean-token}",
        "algorithm: {dapo: {enable: on}}",
        "extends: [a.yaml]",
    ],
)
def test_a_mistake_is_marked(text):
    assert not VALIDATOR.is_valid(parse_yaml(text)[0])


def test_a_key_shows_its_meaning_and_its_default():
    seed = SCHEMA["properties"]["trainer"]["properties"]["seed"]
    assert seed["default"] == Config().trainer.seed and seed["description"]
    clip = SCHEMA["properties"]["actor_rollout_ref"]["properties"]["actor"]["properties"]["clip_ratio_high"]
    assert "Acts only if" in clip["description"]
