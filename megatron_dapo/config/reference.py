"""docs/config.md: every key with its type, default and meaning, from the schema."""

from megatron_dapo.config.keys import ALIASES, Key, known_keys, known_sections, show

_HEAD = """\
# Config reference

Made by `python -m megatron_dapo config-reference > docs/config.md` from `megatron_dapo/config/schema/`; do not edit.

A config is a YAML file plus `key=value` overrides on the command line:

    python -m megatron_dapo train --config FILE trainer.seed=2 "data.train_files=[a.jsonl, b.jsonl]"

`--config-name NAME` in place of `--config FILE` takes `configs/NAME.yaml`.
Later overrides win. Values are read as YAML 1.2 (`1e-6` is a number, `on` is a word); a key that takes text takes it as
it stands. What is not given has the default below. Unknown keys, wrong types and contradictions are reported together
before anything starts; `--dry-run` shows the resolved config and the process plan.
"""

_ALIASES_HEAD = """\
## Other spellings

Names that other documents have for keys, or for sections with all their keys. One file may use either, not both for one
key.

| spelling | means |
|---|---|"""


def config_reference() -> str:
    """Markdown, one table per section."""
    parts = [_HEAD]
    for name, section in known_sections().items():
        keys = [key for key in known_keys().values() if key.name.rpartition(".")[0] == name]
        if not keys:
            continue
        note = section.__doc__
        parts.append(f"## {name}\n")
        if note:
            parts.append(f"{note}\n")
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        parts.extend(_row(key) for key in keys)
        parts.append("")
    return "\n".join([*parts, _ALIASES_HEAD, *(f"| `{alias}` | `{meant}` |" for alias, meant in ALIASES.items()), ""])


def _row(key: Key) -> str:
    cells = (f"`{key.name.rpartition('.')[2]}`", key.allowed, f"`{_default(key)}`", key.doc.replace("\n", " "))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key) -> str:
    if isinstance(key.default, list | tuple):
        return f"[{', '.join(show(item).strip(chr(39)) for item in key.default)}]"
    return key.default or '""' if isinstance(key.default, str) else show(key.default)
