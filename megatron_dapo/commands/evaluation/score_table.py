"""The results of an evaluation: its figures, and the difference between two models on the same
prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron_dapo.algorithms.answer_metrics import LEVEL, Estimate, estimates
from megatron_dapo.common.errors import UserError
from megatron_dapo.rollout.evaluation import by_source, prompt_rows

Row = Mapping[str, float]

ALL = "all"
_PROMPT_CHARS = 80
_TEXTS = {"reward": "{:.3f}", "length": "{:.1f}", "truncated": "{:.1%}"}


def figures(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Estimate | int]]:
    """Return data source -> figure -> estimate, with num_prompts; of several sources also over all
    prompts."""
    rows = prompt_rows(records)
    sources = by_source(rows)
    overall = {ALL: [row for _, row in rows]} if len(sources) > 1 else {}
    return {source: {"num_prompts": len(some), **estimates(some)} for source, some in (sources | overall).items()}


def plain_figures(by_name: Mapping[str, Mapping[str, Estimate | int]]) -> dict[str, Any]:
    """Return figures as plain data: of an estimate {"value", "low", "high"}."""
    return {
        source: {name: asdict(value) if isinstance(value, Estimate) else value for name, value in some.items()}
        for source, some in by_name.items()
    }


def table(by_name: Mapping[str, Mapping[str, Estimate | int]]) -> str:
    """Return the figures as an aligned table, without a newline at the end."""
    lines = []
    for source, some in by_name.items():
        lines.append(f"{source}: {some['num_prompts']} prompts")
        lines += [
            _line(name, value, _TEXTS.get(name, "{:.3f}"))
            for name, value in some.items()
            if isinstance(value, Estimate)
        ]
        lines.append("")
    lines.append(f"In brackets: {LEVEL:.0%} intervals, bootstrap over prompts. avg@n is pass@1.")
    lines.append("length: tokens per answer.")
    return "\n".join(lines)


def comparison(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the changes from one model's answers to another's, on their common prompts, as text.

    names: of the two. Raises UserError without a common prompt.
    """
    before, after = _by_key(first), _by_key(second)
    common = [key for key in before if key in after]
    if not common:
        raise UserError(f"{names[0]} and {names[1]} have no prompt in common; compare answers to the same prompts.")
    lines = [f"A: {names[0]}", f"B: {names[1]}"]
    if len(common) < max(len(before), len(after)):
        lines.append(f"{len(common)} prompts in common; A has {len(before)}, B has {len(after)}")
    pairs = [(before[key][0], _columns(before[key][1]), _columns(after[key][1])) for key in common]
    sources: dict[str, list[tuple[Row, Row]]] = {}
    for record, old, new in pairs:
        sources.setdefault(record["data_source"] or "unnamed", []).append((old, new))
    overall = {ALL: [(old, new) for _, old, new in pairs]} if len(sources) > 1 else {}
    for source, some in (sources | overall).items():
        lines += ["", f"{source}: {len(some)} prompts", *_differences(some)]
    lines += ["", f"In brackets: {LEVEL:.0%} intervals of the paired difference B - A, bootstrap over prompts.", ""]
    return "\n".join([*lines, *_changed_sides(pairs)])


def _line(name: str, value: Estimate, text: str) -> str:
    interval = "" if value.low is None else f"   [{text.format(value.low)}, {text.format(value.high)}]"
    return f"  {name:<10}{text.format(value.value):>10}{interval}"


def _by_key(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Mapping[str, Any], Row]]:
    return {record["prompt_key"]: (record, row) for record, row in prompt_rows(records)}


def _columns(row: Row) -> Row:
    """Return avg@n as avg: with different numbers of answers it means the same; all else keeps its
    k or n."""
    return {name.partition("@")[0] if name.startswith("avg@") else name: value for name, value in row.items()}


def _differences(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    shared = [name for name in pairs[0][0] if all(name in old and name in new for old, new in pairs)]
    differences = estimates([{name: new[name] - old[name] for name in shared} for old, new in pairs])
    lines = [f"  {'':<10}{'A':>10}{'B':>10}{'B - A':>10}"]
    for name in shared:
        text = _TEXTS.get(name, "{:.3f}")
        means = [sum(row[name] for row in rows) / len(pairs) for rows in zip(*pairs, strict=True)]
        signed = text.replace("{:", "{:+")
        value = differences[name]
        interval = "" if value.low is None else f"   [{signed.format(value.low)}, {signed.format(value.high)}]"
        shown = "".join(f"{text.format(mean):>10}" for mean in means)
        lines.append(f"  {name:<10}{shown}{signed.format(value.value):>10}{interval}")
    return lines


def _changed_sides(pairs: Sequence[tuple[Mapping[str, Any], Row, Row]]) -> list[str]:
    """Return the prompts that one model answers right more often than not, and the other does
    not."""
    lines = []
    for what, was_solved in (("solved only by B", False), ("solved only by A", True)):
        some = [
            pair for pair in pairs if (pair[1]["avg"] > 0.5) is was_solved and (pair[2]["avg"] > 0.5) is not was_solved
        ]
        lines.append(f"{what} (more than half of the answers right): {len(some)}")
        for record, old, new in some:
            prompt = " ".join(record["prompt"].split())
            shown = prompt if len(prompt) <= _PROMPT_CHARS else f"...{prompt[-_PROMPT_CHARS:]}"
            lines.append(f"  {old['avg']:.2f} -> {new['avg']:.2f}   {record['data_source'] or 'unnamed'}   {shown}")
    return lines
