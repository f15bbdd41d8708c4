"""Keys given without effect, by the `ActsIf` rules of the schema's fields."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.config.keys import Key, show_text, value_of, was_left_off
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.rules import ActsIf, Condition, Is, IsNot, IsOn


def unused_keys(config: Config, keys: Iterable[Key], overridden: Collection[str] = ()) -> Iterator[str]:
    """Yield a mistake for each of these keys with a value other than its default, but no effect.

    overridden: keys from the command line, meant now. Without effect they are mistakes also at
    their default, and with a switch off on purpose. But null, false and 0 ask for nothing; with
    every switch on, a default takes back a recipe's value.
    """
    for key in keys:
        yield from known_mistakes([_unused_key], config, key, key.name in overridden)


def _unused_key(config: Config, key: Key, is_overridden: bool) -> Iterator[str]:
    value = value_of(config, key.name)
    is_meant = is_overridden and bool(value)
    if value == key.default and not is_meant:
        return
    rules = sorted(key.rules.acts_if, key=_is_switch, reverse=True)
    rule = next((rule for rule in rules if not _holds(rule, config)), None)
    if rule is None:
        return
    if _is_switch(rule):
        is_mistake = is_meant or (value is not None and _was_forgotten(rule, config))
    else:
        is_mistake = value != key.default
    if is_mistake:
        yield _mistake(key, value, rule, config)


def _is_switch(rule: ActsIf) -> bool:
    return any(isinstance(condition, IsOn) for condition in rule.conditions)


def _holds(rule: ActsIf, config: Config) -> bool:
    return any(condition.holds(value_of(config, condition.key)) for condition in rule.conditions)


def _was_forgotten(rule: ActsIf, config: Config) -> bool:
    """Return whether nobody touched a rule's switches."""
    for condition in rule.conditions:
        section, _, switch = condition.key.rpartition(".")
        if not was_left_off(value_of(config, section), switch):
            return False
    return True


def _mistake(key: Key, value: Any, rule: ActsIf, config: Config) -> str:
    states = [f"{condition.key} is {show_text(value_of(config, condition.key))}" for condition in rule.conditions]
    cures = [_cure(condition) for condition in rule.conditions]
    return (
        f"{key.name} is {show_text(value)}, but has no effect while {' and '.join(states)}; "
        f"set {', or '.join(cures)}, or remove {key.name.rpartition('.')[2]}."
    )


def _cure(condition: Condition) -> str:
    """Return the key to set, and its value, for the condition to hold."""
    name = condition.key.rpartition(".")[2]
    match condition:
        case Is(values=values):
            return f"{name} to {' or '.join(map(show_text, values))}"
        case IsOn():
            return f"{name} to true"
        case IsNot():
            return name
