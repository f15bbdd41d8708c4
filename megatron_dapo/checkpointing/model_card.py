"""README.md of a trained model, as model hubs show it: base, data, held-out figures, config."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.checkpointing.config_changes import config_changes
from megatron_dapo.config.key_names import AGENT
from megatron_dapo.config.keys import may_change_on_resume
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder

_CACHED = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/.*")  # the Hub's cache
_FIGURE = re.compile(r"val/((?:.+/)?(?:accuracy|pass@\d+|maj@\d+|reward_mean|loss))")
_URL = re.compile(r"\w[\w+.-]*://\S*")
_FOLDERS = re.compile(r"(?<!\S)(?:~|\.\.?)?/\S*/")  # of a path, but for those that begin with a name


def model_card(config: dict[str, Any], step: int, records: Sequence[Mapping], versions: Mapping[str, str]) -> str:
    """Return the text, for anybody to read: without addresses, folders of absolute paths, and the
    values of free names (`reward.kwargs`) and the arguments of an agent's command, which may be keys.

    Args:
        config: of the run, as `config_to_plain` returns it.
        step: the last one that trained the model.
        records: of the run's metrics.
        versions: of the packages that trained it.
    """
    path = config["actor_rollout_ref"]["model"]["path"]
    run, cached = RunFolder.holding(path), _CACHED.fullmatch(path[:4096])
    base = f"{cached[1]}/{cached[2]}" if cached else f"the model of run {run.path.name}" if run else Path(path).name
    kind = "fine-tuning" if config.get("sft", {}).get("enable") else "reinforcement learning"
    tags = f"[megatron_dapo, {kind.replace(' ', '-')}]"
    head = ["library_name: transformers", "pipeline_tag: text-generation", f"tags: {tags}"]
    head += [f"base_model: {base}"] if cached else []
    changes = [change for change in config_changes(config, Config()) if change.key != f"{AGENT}.command"]
    shown = [change for change in changes if not may_change_on_resume(change.key)]
    keys = [f"| `{change.key}` | {_value(change.before)} | {_value(change.now)} |" for change in shown]
    sections = {
        "Data": [f"- {use}: {_value(json.dumps(config['data'][use]))}" for use in ("train_files", "val_files")],
        "Held-out figures": _figures([record for record in records if record["step"] <= step]),
        "Config, if not at defaults and of effect on learning": ["| key | value | default |", "|---|---|---|", *keys],
        "Made with": [f"- {name} {version}" for name, version in versions.items()],
    }
    lines = ["---", *head, "---", "", f"# {_text(config['trainer']['experiment_name'])}", ""]
    lines.append(f"Made from {_text(base)} by {step} steps of {kind}; that model's licence holds.")
    for title, text in sections.items():
        lines += ["", f"## {title}", "", *text]
    return "\n".join([*lines, ""])


def _figures(records: Sequence[Mapping]) -> list[str]:
    """Return a table of the last held-out figures, beside those before training."""
    by_step: dict[int, dict[str, float]] = {}
    for record in records:
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        if figures := {match[1]: numbers[name] for name in numbers if (match := _FIGURE.fullmatch(name))}:
            by_step[record["step"]] = figures
    if not by_step:
        return ["None were taken."]
    step, after = list(by_step.items())[-1]
    shown = {name: [f"{by[name]:.4g}" if name in by else "-" for by in (by_step.get(0, {}), after)] for name in after}
    rows = [f"| {_text(name)} | {' | '.join(values)} |" for name, values in shown.items()]
    return [f"| held out | before | after step {step} |", "|---|---|---|", *rows]


def _value(json_text: str | None) -> str:
    """Return a config's value as a cell of a table."""
    value = json.loads(json_text or "null")
    items = list(value) if isinstance(value, list | dict) else [value]
    return _text(", ".join(item if isinstance(item, str) else json.dumps(item) for item in items)) or "none"


def _text(text: str) -> str:
    """Return a text on one line, without markup, addresses and the folders of absolute paths."""
    short = _FOLDERS.sub("", _URL.sub("(URL)", " ".join(text[:200].split())))
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", short)
