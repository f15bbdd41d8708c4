"""docs/config.md: every key with its type, default and meaning, from the schema."""

from megatron_dapo.config.aliases import ALIASES, FILTER_GROUPS, MAIN_SWITCH
from megatron_dapo.config.key_names import OVERLONG, SAMPLING
from megatron_dapo.config.keys import (
    FieldRules,
    Key,
    known_keys,
    known_sections,
    section_rules,
    show,
    show_text,
)
from megatron_dapo.config.schema.rules import ActsIf, Condition, Is, IsNot, IsOn

_HEAD = """\
# Config reference

Made by `python -m megatron_dapo config-reference > docs/config.md` from `megatron_dapo/config/schema/`; do not edit.

A config is a YAML file plus `key=value` overrides on the command line:

    python -m megatron_dapo train --config FILE trainer.seed=2 "data.train_files=[a.jsonl, b.jsonl]"

`--config-name NAME` in place of `--config FILE` takes `configs/NAME.yaml`.
A file may begin with `extends: OTHER.yaml`, a path relative to the file: it then holds only the keys that differ from
OTHER.yaml, which extends nothing itself. A list, and a mapping such as `reward.kwargs`, takes the place of the other
file's as a whole. The config that a run saves has all keys.

Later overrides win. Values are read as YAML 1.2 (`1e-6` is a number, `on` is a word); a key that takes text takes it as
it stands. What is not given has the default below. Unknown keys, wrong types and contradictions are reported together
before anything starts; `--dry-run` shows the resolved config and the process plan.

An editor with a YAML language server completes the recipes' keys, shows their meaning and marks mistakes, by the schema
that their first line names. For a file elsewhere: `python -m megatron_dapo config-schema > schema.json` beside it, and
`# yaml-language-server: $schema=schema.json` as its first line.

A key that has no effect must keep its default, unless a file has its switch at false; on the command line it is
refused. What "may change on resume" may differ from the run that wrote the checkpoint; any other change has to be named
in `trainer.accept_changes`.
"""

_ALIASES_HEAD = f"""\
## Other spellings

Names that other documents have for keys, or for sections with all their keys. One file may use either, not both for one
key.

`{MAIN_SWITCH}` must be true where `algorithm.dapo` enables a technique. False switches
`{SAMPLING}` and `{OVERLONG}` off. With
`algorithm.filter_groups.enable`, `metric` is acc and `on_exhausted` is train_partial by default; no other
name of the section may stand beside it. Of a base, a file and overrides the later counts, by whichever name.

| spelling | means |
|---|---|"""


def config_reference() -> str:
    """Return Markdown, one table per section."""
    parts = [_HEAD]
    for name, section in known_sections().items():
        keys = [key for key in known_keys().values() if key.name.rpartition(".")[0] == name]
        if not keys:
            continue
        note = section.__doc__
        parts.append(f"## {name}\n")
        if note:
            parts.append(f"{note}\n")
        if rules := _rules(section_rules()[name], FieldRules(), name):
            parts.append(f"All keys: {rules}\n")
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        parts.extend(_row(key) for key in keys)
        parts.append("")
    return "\n".join(
        [
            *parts,
            _ALIASES_HEAD,
            *(f"| `{alias}` | `{meant}` |" for alias, meant in (ALIASES | FILTER_GROUPS).items()),
            "",
        ]
    )


def _row(key: Key) -> str:
    cells = (f"`{key.name.rpartition('.')[2]}`", key.allowed, f"`{_default(key)}`", key_meaning(key))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells) + " |"


def key_meaning(key: Key) -> str:
    """Return the meaning of a key and its own rules, on one line."""
    section = key.name.rpartition(".")[0]
    rules = _rules(key.rules, section_rules()[section], section)
    return f"{key.doc} {rules}".replace("\n", " ").strip()


def _rules(rules: FieldRules, shown: FieldRules, section: str) -> str:
    """Return sentences for the rules not in `shown`; keys of the section by their last name."""
    acts_if = [_conditions(rule, section) for rule in rules.acts_if if rule not in shown.acts_if]
    sentences = [f"Acts only if {', and '.join(acts_if)}."] if acts_if else []
    if rules.may_change_on_resume and not shown.may_change_on_resume:
        sentences.append("May change on resume.")
    return " ".join(sentences)


def _conditions(rule: ActsIf, section: str) -> str:
    return " or ".join(_condition(condition, section) for condition in rule.conditions)


def _condition(condition: Condition, section: str) -> str:
    match condition:
        case Is(values=values):
            state = f"is {' or '.join(map(show_text, values))}"
        case IsNot(value=value):
            state = f"is not {show_text(value)}"
        case IsOn():
            state = "is true"
    above, _, last = condition.key.rpartition(".")
    return f"`{last if above == section else condition.key}` {state}"


def _default(key: Key) -> str:
    if isinstance(key.default, list | tuple):
        return f"[{', '.join(show(item).strip(chr(39)) for item in key.default)}]"
    return key.default or '""' if isinstance(key.default, str) else show(key.default)
