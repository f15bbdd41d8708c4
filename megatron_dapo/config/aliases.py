"""Other documents' names of keys, and their meanings here. Only the loader knows them.

Most are other spellings. Two are more: `algorithm.dapo.enable`, the main switch of two techniques,
and `algorithm.filter_groups`, verl's dynamic sampling with other defaults.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.config.key_names import OVERLONG, SAMPLING
from megatron_dapo.config.keys import keys_below, show
from megatron_dapo.config.mistake import Mistake

# Other spellings of a key, or of a section with all its keys. Applied one after the other.
ALIASES = {
    "actor": "actor_rollout_ref.actor",
    "critic.vf_coef": "critic.value_loss_coef",
    "algorithm.dapo.dynamic_sampling": SAMPLING,
    "algorithm.dapo.overlong_reward_shaping": OVERLONG,
    f"{OVERLONG}.overlong_buffer_len": f"{OVERLONG}.buffer_len",
}
MAIN_SWITCH = "algorithm.dapo.enable"
_TECHNIQUES = (f"{SAMPLING}.enable", f"{OVERLONG}.enable")
_GROUPS = "algorithm.filter_groups"
FILTER_GROUPS = {
    f"{_GROUPS}.enable": f"{SAMPLING}.enable",
    f"{_GROUPS}.metric": f"{SAMPLING}.filter_mode",
    f"{_GROUPS}.max_num_gen_batches": f"{SAMPLING}.max_num_gen_batches",
    f"{_GROUPS}.on_exhausted": f"{SAMPLING}.on_exhausted",
}
_DEFAULTS = {f"{_GROUPS}.metric": "acc", f"{_GROUPS}.on_exhausted": "train_partial"}
SWITCHES = {MAIN_SWITCH: _TECHNIQUES} | {name: (key,) for name, key in FILTER_GROUPS.items()}
"""Names for more than one key, or with defaults of their own -> their keys."""


@dataclass(frozen=True)
class Setting:
    """A user's value of a key."""

    value: Any
    where: str
    """The file, or "override"."""
    spelling: str
    """The user's name of the key: its own or another."""


def respelled(name: str) -> str:
    """Return the schema's spelling of a name; names in SWITCHES stay."""
    for alias, key in ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            name = key + name[len(alias) :]
    return name


def canonical(name: str) -> str:
    """Return the schema's dotted name for a name."""
    name = respelled(name)
    return FILTER_GROUPS.get(name, name)


def names_in(section: str) -> dict[str, tuple[str, ...]]:
    """Return a section's names known only from aliases: last name -> its keys."""
    names: dict[str, tuple[str, ...]] = {}
    for alias in (*ALIASES, *SWITCHES):
        if alias.startswith(f"{section}."):
            keys = SWITCHES.get(alias) or keys_below(respelled(alias))
            last = alias[len(section) + 1 :].partition(".")[0]
            names[last] = (*names.get(last, ()), *keys)
    return names


def resolve_switches(settings: dict[str, Setting]) -> Iterator[Mistake]:
    """Replace the SWITCHES among the settings by settings of their keys; yield their mistakes."""
    yield from _resolve_main_switch(settings)
    yield from _resolve_filter_groups(settings)


def _resolve_main_switch(settings: dict[str, Setting]) -> Iterator[Mistake]:
    main = settings.pop(MAIN_SWITCH, None)
    techniques = {key: settings[key] for key in _TECHNIQUES if key in settings}
    if main is None:
        for technique in techniques.values():
            if technique.value is True and technique.spelling.startswith("algorithm.dapo."):
                text = (
                    f"{technique.spelling} is true ({technique.where}), but has no effect while {MAIN_SWITCH} is "
                    f"false; set {MAIN_SWITCH} to true, or {technique.spelling} to false."
                )
                yield Mistake((), text)
    elif not isinstance(main.value, bool):
        for key in techniques:
            del settings[key]
        text = f"{MAIN_SWITCH} is {show(main.value)} ({main.where}), but must be true or false."
        yield Mistake(_TECHNIQUES, text)
    elif not main.value:
        settings |= dict.fromkeys(techniques, main)
    elif all(technique.value is False for technique in techniques.values()):
        text = (
            f"{MAIN_SWITCH} is true ({main.where}), but does nothing by itself; enable {SAMPLING} or {OVERLONG}, "
            f"or set it to false (clip-higher is actor_rollout_ref.actor.use_dapo)."
        )
        yield Mistake((), text)


def _resolve_filter_groups(settings: dict[str, Setting]) -> Iterator[Mistake]:
    groups = {name: settings.pop(name) for name in FILTER_GROUPS if name in settings}
    others = {key: setting for key, setting in settings.items() if key.startswith(f"{SAMPLING}.")}
    if groups and others and _is_off(groups, f"{_GROUPS}.enable"):
        return
    if not groups:
        return
    for key in others:
        del settings[key]
    if others and not _is_off(others, f"{SAMPLING}.enable"):
        one, other = next(iter(groups.values())), next(iter(others.values()))
        text = (
            f"{one.spelling} ({one.where}) and {other.spelling} ({other.where}) are two names of one section; give all "
            f"its keys under one of them."
        )
        yield Mistake(keys_below(SAMPLING), text)
        return
    switch = groups.get(f"{_GROUPS}.enable")
    if switch is not None and switch.value is True:
        groups = {name: replace(switch, value=value, spelling=name) for name, value in _DEFAULTS.items()} | groups
    settings |= {FILTER_GROUPS[name]: setting for name, setting in groups.items()}


def _is_off(settings: Mapping[str, Setting], switch: str) -> bool:
    """Return whether the user switched a set of keys off."""
    return switch in settings and settings[switch].value is False


def spellings_of(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the user's names of keys, if other than the schema's."""
    names = {key: setting.spelling for key, setting in settings.items() if setting.spelling != key}
    if not FILTER_GROUPS.keys().isdisjoint(names.values()):
        names = {key: alias for alias, key in FILTER_GROUPS.items()} | names
    return names


def in_spellings(text: str, spellings: Mapping[str, str]) -> str:
    """Return a sentence with the user's names of keys in place of the schema's."""
    if not spellings:
        return text
    keys = "|".join(map(re.escape, spellings))
    return re.sub(rf"(?<![\w.])({keys})(?!\w|\.\w)", lambda match: spellings[match[0]], text)
