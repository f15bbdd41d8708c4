"""Shows the content of a checkpoint, and the tensors in which two differ. Needs neither Megatron
nor
a GPU.

python -m checkpoints_tools.inspect_checkpoint FOLDER [--tensors] [--verify] [--json]
python -m checkpoints_tools.inspect_checkpoint --diff A B [--json]
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from checkpoints_tools.command_line import exit_code, rank, signals_as_exit
from checkpoints_tools.contents import Contents
from checkpoints_tools.tensor_diff import Diff, diff
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE
from megatron_dapo.common.sizes import format_bytes
from megatron_dapo.common.standard_streams import print_line


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0; 1 if the checkpoint is damaged or the two differ; 2 for mistakes of
    the user."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.inspect_checkpoint",
        description="Show the content of a checkpoint: a training checkpoint or the output of hf_to_megatron.",
        epilog="Exit code 0; 1 if the checkpoint is damaged, or with --diff if the two differ; 2 for mistakes.",
    )
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a checkpoint folder")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare the tensors of two checkpoints")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="tensors with matching names, e.g. 'model*'")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--verify", action="store_true", help="compare checksums of all files, not only sizes")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    options = parser.parse_args(argv)
    if (options.checkpoint is None) == (options.diff is None):
        parser.error("give one checkpoint, or --diff with two")
    if rank() != 0:  # one process is enough for it, however many were started
        return 0
    with signals_as_exit():
        return exit_code(lambda: _diff(options) if options.diff else _inspect(options))


def _inspect(options: argparse.Namespace) -> int:
    contents = Contents.of(options.checkpoint, verify=options.verify)
    if options.json:
        print_line(json.dumps(contents.as_json(options.only), indent=2))
    else:
        print_line("\n".join(_lines(contents, options)))
    return FAILED_EXIT_CODE if contents.damage else 0


def _diff(options: argparse.Namespace) -> int:
    a, b = (Contents.of(path, verify=options.verify) for path in options.diff)
    for side in (a, b):
        if side.damage and options.verify:
            raise UserError(f"{side.path}: {'; '.join(side.damage)}; compare whole checkpoints.")
    difference = diff(a, b, pattern=options.only)
    if options.json:
        print_line(json.dumps(difference.as_json(), indent=2))
    else:
        print_line("\n".join(_diff_lines(difference, options.diff)))
    return 0 if difference.is_empty else FAILED_EXIT_CODE


# ---------------------------------------------------------------------------------------- as tables


def _lines(contents: Contents, options: argparse.Namespace) -> Iterable[str]:
    rows = [("checkpoint", str(contents.path)), ("files", _files(contents, options.verify))]
    rows += [("damage", text) for text in contents.damage]
    rows += [("not in the manifest", name) for name in contents.extra]
    if contents.contents:
        rows.append(("contents", ", ".join(contents.contents)))
    if contents.versions:
        rows.append(("written by", ", ".join(f"{name} {version}" for name, version in contents.versions.items())))
    rows += [(name.replace("_", " "), _value(value)) for name, value in (contents.common | contents.state).items()]
    if contents.model:
        rows.append(("model", _value(contents.model)))
    yield from _aligned(rows)
    yield ""
    yield from _table(
        ("tensors", "number", "values", "size", "dtypes"),
        [
            (
                part,
                f"{totals['num_tensors']:,}",
                f"{totals['num_values']:,}",
                format_bytes(totals["num_bytes"]),
                dtypes(totals),
            )
            for part, totals in contents.totals(options.only).items()
        ],
    )
    if contents.objects:
        num = len(contents.objects)
        names = ", ".join(contents.objects[:8])
        yield f"\nbeside them {num} object{'s' if num > 1 else ''}: {names}{', ...' if num > 8 else ''}"
    if options.tensors:
        yield ""
        tensors = [tensor for tensor in contents.tensors.values() if fnmatch(tensor.name, options.only)]
        shown = [
            (t.name, shape(t.shape), dtype(t.dtype), format_bytes(t.num_bytes), f"{len(t.pieces)}") for t in tensors
        ]
        yield from _table(("name", "shape", "dtype", "size", "pieces"), shown, left=3)


def _files(contents: Contents, verified: bool) -> str:
    text = f"{contents.num_files:,}, {format_bytes(contents.num_bytes)}"
    if contents.damage:
        return f"{text}: damaged"
    return f"{text}: {'all checksums right' if verified else 'all sizes right'}"


def _diff_lines(difference: Diff, paths: Sequence[Path]) -> Iterable[str]:
    yield from _aligned([("A", str(paths[0])), ("B", str(paths[1]))])
    only = (*(("A", name) for name in difference.only_a), *(("B", name) for name in difference.only_b))
    for side, name in only:
        yield f"only in {side}: {name}"
    for name, (a, b) in difference.unlike.items():
        yield f"unlike: {name} is {a} in A, {b} in B"
    if difference.changed:
        yield ""
        columns = ("changed", "values", "largest |A-B|", "|A-B| / |A|")
        rows = [
            (c.name, f"{c.num_different:,} of {c.num_values:,}", f"{c.largest:.3g}", f"{c.relative:.3g}")
            for c in sorted(difference.changed, key=lambda c: -c.relative if math.isfinite(c.relative) else -math.inf)
        ]
        yield from _table(columns, rows)
    yield ""
    yield (
        f"{difference.num_equal:,} tensors equal bit for bit, {len(difference.changed):,} changed, "
        f"{len(difference.unlike):,} of other shape or dtype, {len(difference.only_a):,} only in A, "
        f"{len(difference.only_b):,} only in B"
    )


def _aligned(rows: Sequence[tuple[str, str]]) -> Iterable[str]:
    width = max(len(label) for label, _ in rows)
    return (f"{label:<{width}}  {text}" for label, text in rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Iterable[str]:
    """Yield the lines of a table with columns of their content's width.

    The first `left` columns are aligned to the left, and the others to the right.
    """
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    for line in (head, *rows):
        cells = (
            f"{cell:<{width}}" if column < left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(inner)}" for name, inner in value.items())
    return ", ".join(map(_value, value)) if isinstance(value, list) else f"{value}"


def shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "one value"


def dtype(kind: Any) -> str:
    return str(kind).removeprefix("torch.")


def dtypes(totals: dict) -> str:
    return ", ".join(f"{name} ({number:,})" for name, number in totals["dtypes"].items())


if __name__ == "__main__":
    sys.exit(main())
