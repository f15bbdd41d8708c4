"""YAML file + `key=value` overrides -> Config. All mistakes are collected and reported together."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_dapo.config.keys import Key, canonical, known_keys, known_sections, show
from megatron_dapo.config.schema import Config
from megatron_dapo.config.yaml_dialect import YamlMistake, dump_yaml, parse_yaml
from megatron_dapo.errors import UserError

NEAREST_CUTOFF = 0.6
SAME_LAST_COMPONENT = 0.9  # as near as two words of ten letters that differ in one


@dataclass(frozen=True)
class _Setting:
    """A value somebody gave to a known key, where, and under which name: the key's own or another spelling."""

    value: Any
    where: str
    spelling: str


@dataclass(frozen=True)
class Reading:
    """What a file and its overrides hold: the config of what is sound, and the mistakes as sentences.

    in_doubt: keys that have their default in the config because their value was refused, or because an unknown name was
    probably meant for them.
    """

    config: Config
    in_doubt: frozenset[str]
    sentences: tuple[str, ...]


def load_config(path: str | Path | None, overrides: list[str] = ()) -> Config:
    """The config of a YAML file (none = all defaults) with `dotted.key=value` overrides on top, later ones winning.

    An override's value is read as YAML; a key that takes text takes it as it stands. Raises UserError with one sentence
    per unknown key, wrong type, value out of range, duplicate key or unreadable file. Keys together: see `validate`.
    """
    reading = read_config(path, overrides)
    if reading.sentences:
        raise UserError(reading.sentences)
    return reading.config


def read_config(path: str | Path | None, overrides: list[str] = ()) -> Reading:
    """As `load_config`, but the mistakes come with what is sound, so that further checks can go on."""
    sentences: list[str] = []
    settings: dict[str, _Setting] = {}
    if path is not None:
        _collect(_read_file(Path(path), sentences), "", str(path), settings, sentences, once=True)
    for override in overrides:
        _apply_override(override, settings, sentences)
    meant = {key for key in known_keys() if any(f"the nearest known key is {key}." in text for text in sentences)}
    config, refused = _build(settings, sentences)
    return Reading(config, frozenset(meant - settings.keys() | refused), tuple(sentences))


def to_yaml(config: Config) -> str:
    """The whole tree as YAML; `load_config` of it gives an equal config."""
    return dump_yaml(config.model_dump(mode="json"))


def nearest(unknown: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like an unknown dotted name; none if nothing is alike.

    Compared as a whole, by as many last components as the unknown name has (`actor.clip_high` against
    `actor.clip_ratio_high`), and by an equal last component (the right key in the wrong section).
    """
    num_components = unknown.count(".") + 1

    def alike(candidate: str) -> tuple[float, float]:
        suffix = ".".join(candidate.split(".")[-num_components:])
        whole = difflib.SequenceMatcher(None, unknown, candidate).ratio()
        part = difflib.SequenceMatcher(None, unknown, suffix).ratio()
        same_last = unknown.rpartition(".")[2] == candidate.rpartition(".")[2]
        # of several that end so, the first of the schema: the actor's before the critic's
        return max(whole, part, SAME_LAST_COMPONENT * same_last), 1.0 if part == 1.0 else whole

    best = max(candidates, key=alike)
    return best if alike(best)[0] >= NEAREST_CUTOFF else None


# ---------------------------------------------------------------------------------------------------- reading


def _read_file(path: Path, sentences: list[str]) -> dict[str, Any]:
    try:
        tree, duplicates = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        sentences.append(f"Config file {path} cannot be read ({error.strerror}); give the path of a YAML file.")
        return {}
    except UnicodeDecodeError as error:
        sentences.append(f"Config file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8.")
        return {}
    except YamlMistake as error:
        sentences.append(f"Config file {path} is not valid YAML: {error}.")
        return {}
    sentences += [f"Config file {path}: {duplicate}; keep one." for duplicate in duplicates]
    if tree is not None and not isinstance(tree, dict):
        sentences.append(f"Config file {path} holds {show(tree)}, but must hold a mapping such as `data: ...`.")
    return tree if isinstance(tree, dict) else {}


def _apply_override(override: str, settings: dict[str, _Setting], sentences: list[str]) -> None:
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not name:
        sentences.append(f"Override {override!r} is not of the form key=value, such as trainer.seed=2.")
        return
    key = known_keys().get(canonical(name))
    try:
        value, duplicates = parse_yaml(text)
    except YamlMistake as error:
        if key is None or not key.is_text:
            sentences.append(f"Override {override!r} has a value that is not valid YAML: {error}.")
            return
        value, duplicates = text, []
    sentences += [f"Override {override!r}: {duplicate}; keep one." for duplicate in duplicates]
    if key is not None and key.is_text and not isinstance(value, str) and not (value is None and key.takes_null):
        value = text
    if parent := _mapping_key_above(canonical(name)):
        value = {**_mapping_so_far(parent, settings), canonical(name)[len(parent.name) + 1 :]: value}
        name = parent.name
    head, _, last = name.rpartition(".")
    _collect({last: value}, head, "override", settings, sentences)


def _mapping_key_above(name: str) -> Key | None:
    """The key of free names that a name such as reward.kwargs.tolerance goes into."""
    return next((key for key in known_keys().values() if key.is_mapping and name.startswith(f"{key.name}.")), None)


def _mapping_so_far(key: Key, settings: dict[str, _Setting]) -> dict[str, Any]:
    value = settings[key.name].value if key.name in settings else key.default
    return value if isinstance(value, dict) else {}


def _collect(
    tree: dict, prefix: str, where: str, settings: dict[str, _Setting], sentences: list[str], once: bool = False
) -> None:
    """Walk a tree along the schema: known keys into `settings`, unknown ones into `sentences`.

    prefix: as it was written. once: a key that was set before is a mistake (`a: {b: 1}` and `a.b: 1` in one file, or
    the same key in two spellings).
    """
    for child, value in tree.items():
        name = f"{prefix}.{child}".lstrip(".")
        key = canonical(name)
        if key in known_keys():
            if once and key in settings:
                other = settings[key].spelling
                both = "" if other == name else f", as {other} and as {name}"
                sentences.append(f"{key} is given twice in {where}{both}; keep one.")
            settings[key] = _Setting(value, where, name)
        elif key not in known_sections():
            sentences.append(_unknown(name[:200], value, where))
        elif isinstance(value, dict):
            _collect(value, name, where, settings, sentences, once)
        elif value is not None:
            inside = ", ".join(known_sections()[key].model_fields)
            sentences.append(f"{name} is {show(value)} ({where}), but must be a mapping with keys of {inside}.")


def _unknown(name: str, value: Any, where: str) -> str:
    if isinstance(value, dict):
        candidates = [section for section in known_sections() if section]
        candidates += [key.name for key in known_keys().values() if key.is_mapping]
    else:
        candidates = list(known_keys())
    near = nearest(name, candidates)
    cure = (
        f"the nearest known key is {near}"
        if near
        else "`python -m megatron_dapo config-reference` lists the known keys"
    )
    return f"Unknown key {name} = {show(value)} ({where}); {cure}."


# ---------------------------------------------------------------------------------------------------- building


def _build(settings: dict[str, _Setting], sentences: list[str]) -> tuple[Config, set[str]]:
    """The typed config and the keys whose value was refused: mistakes of type and range become sentences."""
    try:
        return Config.model_validate(_tree(settings)), set()
    except ValidationError as error:
        wrong = {_key_at(detail["loc"]): None for detail in error.errors(include_url=False)}
    for name in wrong:
        setting, key = settings[name], known_keys()[name]
        sentences.append(f"{setting.spelling} is {show(setting.value)} ({setting.where}), but must be {key.allowed}.")
    sound = {name: setting for name, setting in settings.items() if name not in wrong}
    return Config.model_validate(_tree(sound)), set(wrong)


def _tree(settings: dict[str, _Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, setting in settings.items():
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = setting.value
    return tree


def _key_at(location: tuple[str | int, ...]) -> str:
    """The key that a location inside its value belongs to."""
    parts = [str(part) for part in location]
    return next(name for i in range(1, len(parts) + 1) if (name := ".".join(parts[:i])) in known_keys())
