"""YAML file + `key=value` overrides -> Config. All mistakes are collected and reported together.

A file may say `extends: base.yaml`, a path relative to itself. Its own keys win over that file's.
The base may extend no other file: a reader opens two files at most.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.aliases import (
    SWITCHES,
    Setting,
    in_spellings,
    names_in,
    resolve_switches,
    respelled,
    spellings_of,
)
from megatron_dapo.config.keys import Key, keys_below, known_keys, known_sections, show, show_text, without_keys
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.yaml_dialect import YamlMistake, dump_yaml, parse_yaml

EXTENDS = "extends"
_OVERRIDE = "override"
NEAREST_CUTOFF = 0.6
MAX_BYTES = 10**6
MAX_UNKNOWN = 20  # searches for the nearest known key: each takes some milliseconds
SAME_LAST_COMPONENT = 0.9  # the likeness of two words of ten letters with one difference


@dataclass
class _Collected:
    """Settings of known keys, mistakes, and names of unknown keys, collected so far."""

    settings: dict[str, Setting] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    source: int = 0
    """Number of the base, the file or the override that is being read."""


@dataclass(frozen=True)
class Reading:
    """A file and its overrides as read."""

    config: Config
    """The sound part; other keys have their defaults."""
    in_doubt: frozenset[str]
    """Keys without a known value: it was refused or unreadable, or an unknown name was probably
    meant for them."""
    overridden: frozenset[str]
    """Keys with a value from an override."""
    spellings: dict[str, str]
    """The user's names of keys, if other than the schema's."""
    mistakes: tuple[Mistake, ...]

    @property
    def known(self) -> Config:
        """Return the config without the keys in doubt: reading one raises Refused."""
        return without_keys(self.config, self.in_doubt)

    def with_mistakes(self, others: Iterable[str]) -> list[str]:
        """Return the mistakes of the reading, and others with the user's names of keys."""
        own = [mistake.text for mistake in self.mistakes]
        return own + [in_spellings(other, self.spellings) for other in others]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a YAML file (None: all defaults) with `dotted.key=value` overrides on
    top.

    The last override wins. Its value is read as YAML, or for a key of text taken as it stands.
    Raises UserError with one sentence per unknown key, wrong type, value out of range, duplicate
    key or unreadable file. Keys together: see `validate`.
    """
    reading = read_config(path, overrides)
    if reading.mistakes:
        raise UserError(mistake.text for mistake in reading.mistakes)
    return reading.config


def read_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Reading:
    """Read like `load_config`, but return the mistakes with the sound part: further checks can go
    on."""
    collected = _Collected()
    if path is not None:
        _collect_file(Path(path), collected)
    for override in overrides:
        _apply_override(override, collected)
    settings = collected.settings
    collected.mistakes.extend(resolve_switches(settings))
    overridden = {name for name, setting in settings.items() if setting.where == _OVERRIDE}
    if more := collected.unknown[MAX_UNKNOWN:]:
        collected.mistakes.append(
            Mistake((), f"Unknown keys besides: {len(more)}, the first of them {more[0]}; remove them.")
        )
    config, sound = _build(settings, collected.mistakes)
    in_doubt = {key for mistake in collected.mistakes for key in mistake.keys} - sound
    spellings = spellings_of(settings)
    return Reading(config, frozenset(in_doubt), frozenset(overridden), spellings, tuple(collected.mistakes))


def to_yaml(config: Config) -> str:
    """Return the whole tree as YAML; `load_config` of it gives an equal config."""
    return dump_yaml(config.model_dump(mode="json"))


def nearest(unknown: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like an unknown dotted name; None if nothing is alike.

    Three comparisons count: of whole names; of ends with the unknown name's number of components
    (`actor.clip_high` against `actor.clip_ratio_high`); of last components (the right key in the
    wrong section).
    """
    num_components = unknown.count(".") + 1

    def alike(candidate: str) -> tuple[float, float]:
        suffix = ".".join(candidate.split(".")[-num_components:])
        whole = difflib.SequenceMatcher(None, unknown, candidate).ratio()
        part = difflib.SequenceMatcher(None, unknown, suffix).ratio()
        same_last = unknown.rpartition(".")[2] == candidate.rpartition(".")[2]
        # of several with this end, the schema's first: the actor's before the critic's
        return max(whole, part, SAME_LAST_COMPONENT * same_last), 1.0 if part == 1.0 else whole

    best = max(candidates, key=alike)
    return best if alike(best)[0] >= NEAREST_CUTOFF else None


# ---------------------------------------------------------------------------------- reading


def _collect_file(path: Path, collected: _Collected) -> None:
    """Collect the settings of a file, on top of its base's."""
    tree = _read_file(path, f"Config file {path}", collected.mistakes)
    if EXTENDS in tree:
        _collect_base(path, tree.pop(EXTENDS), collected)
    _collect(tree, "", str(path), collected)
    collected.source += 1


def _collect_base(path: Path, value: Any, collected: _Collected) -> None:
    """Collect the settings of a file's base, named by this value."""
    subject = f"{EXTENDS} is {show_text(value)} ({path}), but"
    if not isinstance(value, str):
        text = f"{subject} must be the path of a YAML file, relative to this one."
        collected.mistakes.append(Mistake(keys_below(""), text))
        return
    base = path.parent / value
    tree = _read_file(base, f"{subject} {base}", collected.mistakes)
    if EXTENDS in tree:
        cure = f"extend {show_text(tree[EXTENDS])} itself, or write its keys out"
        collected.mistakes.append(Mistake(keys_below(""), f"{subject} {base} extends a file, too; {cure}."))
        return
    _collect(tree, "", str(base), collected)
    collected.source += 1


def _read_file(path: Path, subject: str, mistakes: list[Mistake]) -> dict[str, Any]:
    """Return the tree of a file; {} and a mistake beginning with `subject` if it has none."""
    try:
        tree, duplicates = parse_yaml(_text_of(path))
        if not isinstance(tree, dict | None):
            raise YamlMistake(f"it holds {show(tree)}, but must hold a mapping such as `data: ...`")
    except OSError as error:
        fault = f"cannot be read ({error.strerror}); give the path of a YAML file."
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text (byte {error.start}); save it as UTF-8."
    except YamlMistake as error:
        fault = f"is not a config in YAML: {error}."
    else:
        mistakes += [Mistake((), f"Config file {path}: {duplicate}; keep one.") for duplicate in duplicates]
        return tree or {}
    mistakes.append(Mistake(keys_below(""), f"{subject} {fault}"))
    return {}


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise YamlMistake(f"it is above {MAX_BYTES // 10**6} MB, which no config is; give the path of another file")
    return content.decode("utf-8")


def _apply_override(override: str, collected: _Collected) -> None:
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not name:
        collected.mistakes.append(
            Mistake(_meant(name), f"Override {override!r} is not of the form key=value, such as trainer.seed=2.")
        )
        return
    key = known_keys().get(respelled(name))
    try:
        value, duplicates = parse_yaml(text)
    except YamlMistake as error:
        if key is None or not key.is_text:
            collected.mistakes.append(
                Mistake(_meant(name), f"Override {override!r} has a value that is not valid YAML: {error}.")
            )
            return
        value = text
        duplicates = []
    collected.mistakes.extend(Mistake((), f"Override {override!r}: {duplicate}; keep one.") for duplicate in duplicates)
    if key is not None and key.is_text and not isinstance(value, str) and not (value is None and key.takes_null):
        value = text
    if parent := _mapping_key_above(respelled(name)):
        value = {**_mapping_so_far(parent, collected.settings), respelled(name)[len(parent.name) + 1 :]: value}
        name = parent.name
    head, _, last = name.rpartition(".")
    _collect({last: value}, head, _OVERRIDE, collected)
    collected.source += 1


def _meant(name: str) -> tuple[str, ...]:
    """Return the name's key, or the keys of its section; none for another name."""
    known = respelled(name)
    return SWITCHES.get(known) or (keys_below(known) if known else ())


def _mapping_key_above(name: str) -> Key | None:
    """Return the key of free names above a name such as reward.kwargs.tolerance."""
    return next((key for key in known_keys().values() if key.is_mapping and name.startswith(f"{key.name}.")), None)


def _mapping_so_far(key: Key, settings: dict[str, Setting]) -> dict[str, Any]:
    value = settings[key.name].value if key.name in settings else key.default
    return value if isinstance(value, dict) else {}


def _collect(tree: dict, prefix: str, where: str, collected: _Collected) -> None:
    """Walk a tree along the schema: known keys into the settings, the first unknown ones into the
    mistakes.

    prefix: in the user's spelling. The same key twice in one file is a mistake (`a: {b: 1}` and
    `a.b: 1`, or two spellings).
    """
    for child, value in tree.items():
        name = f"{prefix}.{child}".lstrip(".")
        key = respelled(name)
        if key in known_keys() or key in SWITCHES:
            earlier = collected.settings.get(key)
            if earlier is not None and earlier.where == where != _OVERRIDE:
                both = "" if earlier.spelling == name else f", as {earlier.spelling} and as {name}"
                collected.mistakes.append(Mistake(_meant(key), f"{key} is given twice in {where}{both}; keep one."))
            collected.settings[key] = Setting(value, where, name, collected.source, earlier)
        elif key not in known_sections() and not names_in(key):
            collected.unknown.append(name[:200])
            if len(collected.unknown) <= MAX_UNKNOWN:
                collected.mistakes.append(_unknown(name[:200], value, where))
        elif isinstance(value, dict):
            _collect(value, name, where, collected)
        elif value is not None:
            collected.mistakes.append(_no_mapping(name, value, where))


def _no_mapping(name: str, value: Any, where: str) -> Mistake:
    """Return the mistake of a section given a plain value."""
    section = respelled(name)
    if section in known_sections():
        inside: Iterable[str] = known_sections()[section].model_fields
        keys = keys_below(section)
    else:
        inside = names_in(section)
        keys = tuple(key for keys in names_in(section).values() for key in keys)
    text = f"{name} is {show(value)} ({where}), but must be a mapping with keys of {', '.join(inside)}."
    return Mistake(keys, text)


def _unknown(name: str, value: Any, where: str) -> Mistake:
    if isinstance(value, dict):
        candidates = [section for section in known_sections() if section]
        candidates += [key.name for key in known_keys().values() if key.is_mapping]
    else:
        candidates = [*known_keys(), *SWITCHES]
    near = nearest(name, candidates)
    cure = (
        f"the nearest known key is {near}"
        if near
        else "`python -m megatron_dapo config-reference` lists the known keys"
    )
    return Mistake(_meant(near) if near else (), f"Unknown key {name} = {show(value)} ({where}); {cure}.")


# ---------------------------------------------------------------------------------- building


def _build(settings: dict[str, Setting], mistakes: list[Mistake]) -> tuple[Config, set[str]]:
    """Return the typed config, and its sound keys; those of a wrong type or range go into
    `mistakes`."""
    try:
        return Config.model_validate(_tree(settings)), set(settings)
    except ValidationError as error:
        wrong = {_key_at(detail["loc"]): None for detail in error.errors(include_url=False)}
    for name in wrong:
        setting = settings[name]
        key = known_keys()[name]
        text = f"{setting.spelling} is {show(setting.value)} ({setting.where}), but must be {key.allowed}."
        mistakes.append(Mistake((name,), text))
    sound = {name: setting for name, setting in settings.items() if name not in wrong}
    return Config.model_validate(_tree(sound)), set(sound)


def _tree(settings: dict[str, Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, setting in settings.items():
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = setting.value
    return tree


def _key_at(location: tuple[str | int, ...]) -> str:
    """Return the key of a location inside its value."""
    parts = [str(part) for part in location]
    return next(name for i in range(1, len(parts) + 1) if (name := ".".join(parts[:i])) in known_keys())
