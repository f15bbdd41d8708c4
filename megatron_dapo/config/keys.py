"""Every key of the config tree by its dotted name: type in words, default, meaning, rules."""

import reprlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from megatron_dapo.config.schema.base import ImportPath, Section
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.rules import ActsIf, OnResume

_TYPE_WORDS = {
    bool: ("true or false", "true/false values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    type(None): ("null", "nulls"),
}
_BOUND_WORDS = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt"), Le: ("<=", "le")}


@dataclass(frozen=True)
class FieldRules:
    """Rules of a key, from its field and the fields of its sections."""

    acts_if: tuple[ActsIf, ...] = ()  # with dotted names of keys; all must hold
    may_change_on_resume: bool = False

    def and_of(self, field: FieldInfo, section: str) -> "FieldRules":
        """Return these rules with those of a field of the section `section` added."""
        own = tuple(_with_dotted_names(rule, section) for rule in field.metadata if isinstance(rule, ActsIf))
        is_marked = any(isinstance(mark, OnResume) for mark in field.metadata)
        return FieldRules(self.acts_if + own, self.may_change_on_resume or is_marked)


@dataclass(frozen=True)
class Key:
    """A leaf of the tree."""

    name: str
    annotation: Any
    allowed: str  # its values, in words
    default: Any
    doc: str  # its meaning
    rules: FieldRules = FieldRules()  # with its sections' rules

    @property
    def is_text(self) -> bool:
        """Return whether any unquoted override is a value of the key as it stands."""
        return self.annotation is str or set(get_args(self.annotation)) == {str, type(None)}

    @property
    def takes_null(self) -> bool:
        return type(None) in get_args(self.annotation)

    @property
    def takes_import_path(self) -> bool:
        """Return whether the key may name code of the user's own, beside built-in names or alone."""
        return _has_import_path(self.annotation)

    @property
    def is_mapping(self) -> bool:
        """Return whether the key holds free names, such as the keyword arguments of a reward
        function."""
        return get_origin(self.annotation) is dict


@cache
def known_keys() -> dict[str, Key]:
    """Return the keys by their dotted names, in the order of the schema."""
    return {key.name: key for key in _leaves(Config, "", FieldRules())}


def without_keys(config: Config, names: Iterable[str]) -> Config:
    """Return a copy of a config without these keys: reading one raises Refused."""
    for name in names:
        config = _without_key(config, name.split("."))
    return config


def _without_key(section: Any, names: Sequence[str]) -> Any:
    name, *rest = names
    if rest:
        return section.model_copy(update={name: _without_key(getattr(section, name), rest)})
    section = section.model_copy()
    del section.__dict__[name]
    return section


def keys_below(name: str) -> tuple[str, ...]:
    """Return the keys of a section and its sections, or the key itself; "" = all of the tree."""
    return tuple(key for key in known_keys() if name in ("", key) or key.startswith(f"{name}."))


@cache
def known_sections() -> dict[str, type[Section]]:
    """Return the section classes by their dotted names, in the order of the schema. The whole tree
    is ""."""
    return {name: section for name, section, _ in _sections(Config, "", FieldRules())}


@cache
def section_rules() -> dict[str, FieldRules]:
    """Return the rules of all keys in each section, by its dotted name."""
    return {name: rules for name, _, rules in _sections(Config, "", FieldRules())}


def may_change_on_resume(name: str) -> bool:
    """Return whether a key may differ from the checkpoint's run. For a key unknown to this program
    its section decides."""
    if key := known_keys().get(name):
        return key.rules.may_change_on_resume
    section = name
    while section not in known_sections():
        section = section.rpartition(".")[0]
    return section_rules()[section].may_change_on_resume


def value_of(config: Config, name: str) -> Any:
    """Return the value of a key."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """Return a copy of a config with other values at these dotted keys; nothing is checked."""
    for key, value in keys.items():
        config = _with_key(config, key.split("."), value)
    return config


def _with_key(section: Any, names: Sequence[str], value: object) -> Any:
    name, *rest = names
    return section.model_copy(update={name: _with_key(getattr(section, name), rest, value) if rest else value})


def show(value: Any) -> str:
    """Return a value in a user's spelling, a text in quotes, cut at a length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _SHORT.repr(value)


def show_text(value: Any) -> str:
    """Return a value in a user's spelling, a text without quotes."""
    return value if isinstance(value, str) else show(value)


def was_left_off(section: Section, switch: str = "enable") -> bool:
    """Return whether nobody touched a section's switch: its other keys then hint at a forgotten
    `enable: true`. With the switch off on purpose they may stay, for runs of a recipe without
    it."""
    return not getattr(section, switch) and switch not in section.model_fields_set


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def _sections(section: type[Section], name: str, rules: FieldRules) -> Iterator[tuple[str, type[Section], FieldRules]]:
    yield name, section, rules
    for child, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from _sections(field.annotation, f"{name}.{child}".lstrip("."), rules.and_of(field, name))


def _leaves(section: type[Section], prefix: str, rules: FieldRules) -> Iterator[Key]:
    for child, field in section.model_fields.items():
        name = f"{prefix}.{child}".lstrip(".")
        if _is_section(field.annotation):
            yield from _leaves(field.annotation, name, rules.and_of(field, prefix))
        else:
            yield Key(
                name,
                field.annotation,
                allowed=_in_words(field.annotation, field.metadata),
                default=field.get_default(call_default_factory=True),
                doc=field.description or "",
                rules=rules.and_of(field, prefix),
            )


def _with_dotted_names(rule: ActsIf, section: str) -> ActsIf:
    """Return the rule of a section's field, with whole names of keys."""
    conditions = (
        condition if "." in condition.key else condition.of_key(f"{section}.{condition.key}")
        for condition in rule.conditions
    )
    return ActsIf(*conditions)


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _has_import_path(annotation: Any) -> bool:
    return annotation == ImportPath or any(map(_has_import_path, get_args(annotation)))


def _in_words(annotation: Any, metadata: Sequence[Any] = (), plural: bool = False) -> str:
    """Return the words for a type and its bounds: `PositiveInt | None` becomes "a whole number > 0,
    or null"."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if annotation == ImportPath:
        return "package.module:name"
    if origin is Annotated:
        return _in_words(args[0], [m for arg in args[1:] for m in _constraints(arg)], plural)
    if origin is Literal:
        return ("any of " if plural else "one of ") + ", ".join(args)
    if origin in (Union, types.UnionType):
        return ", or ".join(_in_words(arg, plural=plural) for arg in args)
    if origin is list:
        return f"a list of {_in_words(args[0], plural=True)}"
    if origin is tuple:
        return f"a list of {len(args)} {_in_words(args[0], plural=True)}"
    if origin is dict:
        return f"a mapping of names to {_in_words(args[1], plural=True)}"
    bounds = [
        f"{sign} {getattr(m, attribute):g}"
        for m in metadata
        for kind, (sign, attribute) in _BOUND_WORDS.items()
        if type(m) is kind
    ]
    return " ".join([_TYPE_WORDS[annotation][plural], " and ".join(bounds)]).strip()


def _constraints(metadata: Any) -> list[Any]:
    return metadata.metadata if isinstance(metadata, FieldInfo) else [metadata]
