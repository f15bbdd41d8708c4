"""Other documents' names of keys, and their meanings here. Only the loader knows them.

Most are other spellings. Two are more: `algorithm.dapo.enable`, the main switch of two techniques,
and `algorithm.filter_groups`, verl's dynamic sampling with other defaults.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

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
_NO_METRICS = ("strict", "remove_all_correct", "remove_all_incorrect", "none")  # modes by correctness
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
    source: int = 0
    """Number of the file or override, in the order of reading."""
    replaced: "Setting | None" = None
    """The setting of an earlier source."""

    def ever(self, holds: Callable[["Setting"], bool]) -> bool:
        """Return whether this setting or one that it replaced fulfils a condition."""
        return holds(self) or (self.replaced is not None and self.replaced.ever(holds))


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
        if not any(technique.ever(_is_on_by_schema) for technique in techniques.values()):
            yield from _without_main_switch(techniques.values())
    elif not isinstance(main.value, bool):
        for key in techniques:
            del settings[key]
        text = f"{MAIN_SWITCH} is {show(main.value)} ({main.where}), but must be true or false."
        yield Mistake(_TECHNIQUES, text)
    elif not main.value:
        later = {key: technique for key, technique in techniques.items() if technique.source > main.source}
        yield from _without_main_switch(later.values())
        settings |= dict.fromkeys(techniques.keys() - later.keys(), main)
    elif all(technique.value is False for technique in techniques.values()):
        text = (
            f"{MAIN_SWITCH} is true ({main.where}), but does nothing by itself; enable {SAMPLING} or {OVERLONG}, "
            f"or set it to false (clip-higher is actor_rollout_ref.actor.use_dapo)."
        )
        yield Mistake((), text)


def _is_on_by_schema(technique: Setting) -> bool:
    return technique.value is True and not technique.spelling.startswith("algorithm.dapo.")


def _without_main_switch(techniques: Iterable[Setting]) -> Iterator[Mistake]:
    """Yield a mistake for each technique that is enabled below a main switch that is off."""
    for technique in techniques:
        if technique.value is True and not _is_on_by_schema(technique):
            text = (
                f"{technique.spelling} is true ({technique.where}), but has no effect while {MAIN_SWITCH} is "
                f"false; set {MAIN_SWITCH} to true, or {technique.spelling} to false."
            )
            yield Mistake((), text)


def _resolve_filter_groups(settings: dict[str, Setting]) -> Iterator[Mistake]:
    """Replace verl's section; of two sections the one that is on counts, or the later switch."""
    groups = {name: settings.pop(name) for name in FILTER_GROUPS if name in settings}
    others = {key: setting for key, setting in settings.items() if key.startswith(f"{SAMPLING}.")}
    switch, other = groups.get(f"{_GROUPS}.enable"), others.get(f"{SAMPLING}.enable")
    if not groups:
        return
    if others and _is_off(switch):
        if other is not None and switch.source > other.source:
            settings[f"{SAMPLING}.enable"] = switch
        yield from _in_vain(groups)
        return
    if others and _is_off(other) and switch is not None and other.source > switch.source:
        return
    for key in others:
        del settings[key]
    if others and not _is_off(other):
        one, another = next(iter(groups.values())), next(iter(others.values()))
        text = (
            f"{one.spelling} ({one.where}) and {another.spelling} ({another.where}) are two names of one section; "
            f"give all its keys under one of them."
        )
        yield Mistake(keys_below(SAMPLING), text)
        return
    if switch is not None and switch.value is True:
        groups = {name: replace(switch, value=value, spelling=name) for name, value in _DEFAULTS.items()} | groups
        yield from _wrong_metric(groups)
    else:
        groups = {name: setting for name, setting in groups.items() if setting.value != _DEFAULTS.get(name)}
    settings |= {FILTER_GROUPS[name]: setting for name, setting in groups.items()}


def _is_off(switch: Setting | None) -> TypeGuard[Setting]:
    """Return whether a section was switched off by hand."""
    return switch is not None and switch.value is False


def _in_vain(groups: Mapping[str, Setting]) -> Iterator[Mistake]:
    """Yield a mistake for each override of a section that is off."""
    for name, setting in groups.items():
        if setting.where == "override" and name != f"{_GROUPS}.enable":
            yield Mistake(
                (),
                f"{name} is {show(setting.value)} (override), but has no effect while {_GROUPS}.enable is false; "
                f"give {FILTER_GROUPS[name]}.",
            )


def _wrong_metric(groups: Mapping[str, Setting]) -> Iterator[Mistake]:
    metric = groups[f"{_GROUPS}.metric"]
    if isinstance(metric.value, str) and metric.value in _NO_METRICS:
        text = f"{metric.spelling} is {show(metric.value)} ({metric.where}), but must name a metric, such as acc."
        yield Mistake((f"{SAMPLING}.filter_mode",), text)


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
