"""The table of a preflight: a line per check and outcome, aligned."""

from collections.abc import Sequence

from launch.preflight.nodes import NodeFinding

_SHOWN_NODES = 4


def table(findings: Sequence[NodeFinding], names: Sequence[str]) -> str:
    """Return the table of the findings. Nodes that found the same share a line.

    `findings` are in the order of the checks. `names` are the names of all nodes.
    """
    rows: dict[tuple[str, str, bool], list[str]] = {}
    for finding in findings:
        rows.setdefault((finding.check, finding.found, finding.problem is None), []).append(finding.node)
    lines = [
        ("ok" if is_well else "FAIL", check, _nodes(nodes, names), summary)
        for (check, summary, is_well), nodes in rows.items()
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    title = f"Preflight of {len(names)} node{'s' if len(names) > 1 else ''}"
    return "\n".join([title, *("  " + "  ".join(map(str.ljust, line, [*widths, 0])).rstrip() for line in lines)])


def _nodes(nodes: Sequence[str], names: Sequence[str]) -> str:
    if len(nodes) == len(names) > 1:
        return f"all {len(names)}"
    shown = ", ".join(nodes[:_SHOWN_NODES])
    return shown + (f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else "")
