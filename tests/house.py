"""Measure the house on one page: rooms, names, docs, functions, wording, wide lines and tests.

Run `make house`, or `python -m tests.house FOLDER` for another checkout. No figure is a limit.

How it counts:

- Product: PRODUCT without `site` folders; their modules replace parts of SGLang.
- Room: the Python files of one folder, without those of its subfolders.
- Public names: top-level classes and functions without a leading underscore.
- Config keys: the leaves that `known_keys` returns.
- Docs: README, CHANGELOG, CONTRIBUTING and docs/*.md; words are separated by white space.
  A page is generated if its first lines say "do not edit".
- Functions: methods and nested ones too; from `def` to the last line.
- Wording, whole words. Column "text": in docstrings, comments and string literals, in any case.
  Column "source": in the whole source, in this case, as `grep -ow` counts.
- Wide lines: full lines of docstrings and comments, with the code before a comment.
- Tests: JUnit files of the last `make test`. Cases run side by side, so the seconds of the layers
  add up to more than those on the clock.
"""

import argparse
import ast
import importlib
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

PRODUCT = ("megatron_dapo", "launch", "checkpoints_tools")
BESIDE = ("benchmarks", "examples", "tests")
RUNS = ("unit", "processes")  # of `make test`: .cache/tests-NAME.xml
MAX_FILES, MAX_LINES = 25, 3_700  # aims for a room
LONG_FUNCTION = 60
WIDE = 100
# a response's way from its prompt to its loss: one turn, and several updates in each step
RECORDS = (
    "Prompt Generation Trajectory RewardRequest RewardResult Sample Group RolloutStep RolloutBatch"
    " SampleReward TrainSample StepShard MicroBatch ScoreTask Scores LossTask TokenBatch TokenOutputs"
    " TokenLoss HeadLoss LossSums"
).split()
# environments, responses that go on after a push, rollout correction, and estimators per token
OPTIONAL_RECORDS = "Task Observation PartialResponse Corrected TokenRewards".split()
PHRASES = (
    "what,where,that is,alone,those that,one that,as many,which,whose,whoever,whatever,Return what,None ="
).split(",")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Source:
    """A Python file."""

    path: Path  # below the root
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def comments(self) -> dict[int, str]:
        """Return line number -> comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    @cached_property
    def public(self) -> list[ast.ClassDef | Function]:
        """Return the public classes and functions at the top level."""
        (module, *_) = self.nodes
        assert isinstance(module, ast.Module)
        named = [node for node in module.body if isinstance(node, ast.ClassDef | Function)]
        return [node for node in named if not node.name.startswith("_")]

    def words(self) -> str:
        """Return docstrings, other strings and comments, in one line."""
        strings = [node.value for node in self.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        comments = [comment.lstrip("#") for comment in self.comments.values()]
        return " ".join(" ".join([*strings, *comments]).split())

    def docstring_lines(self) -> set[int]:
        """Return the numbers of the lines of docstrings."""
        lines: set[int] = set()
        for node in self.nodes:
            if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
                lines.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        return lines


@dataclass(frozen=True)
class House:
    """The files of a checkout."""

    root: Path

    @cached_property
    def _files(self) -> list[Source]:
        paths = [path for folder in (*PRODUCT, *BESIDE) for path in sorted((self.root / folder).rglob("*.py"))]
        return [Source(path.relative_to(self.root), path.read_text(encoding="utf-8")) for path in paths]

    def part(self, *folders: str) -> list[Source]:
        """Return the Python files below these top-level folders, without `site` folders."""
        files = [source for source in self._files if source.path.parts[0] in folders]
        return [source for source in files if "site" not in source.path.parts]

    @cached_property
    def product(self) -> list[Source]:
        return self.part(*PRODUCT)

    @cached_property
    def stand_ins(self) -> list[Source]:
        return [source for source in self._files if "site" in source.path.parts]

    @cached_property
    def pages(self) -> dict[str, str]:
        """Return path -> text of each page of the docs."""
        paths = [*sorted(self.root.glob("docs/*.md")), *sorted(self.root.glob("*.md"))]
        return {str(path.relative_to(self.root)): path.read_text(encoding="utf-8") for path in paths}

    @cached_property
    def prose(self) -> str:
        """Return the text of all pages that are not generated."""
        return "".join(text for text in self.pages.values() if not is_generated(text))

    def module_with(self, name: str) -> str | None:
        """Return the module of the product that defines a public class or function."""
        for source in self.product:
            if any(node.name == name for node in source.public):
                return ".".join(source.path.with_suffix("").parts).removesuffix(".__init__")
        return None

    def missing_records(self) -> list[str]:
        """Return the names in RECORDS and OPTIONAL_RECORDS that no class of the product has."""
        nodes = [node for source in self.product for node in source.public]
        classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        return [name for name in (*RECORDS, *OPTIONAL_RECORDS) if name not in classes]


def row(name: str, *values: object) -> str:
    """Return a line of a table; numbers get thousands separators."""
    cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    return f"{name:<24}" + "".join(f"{cell:>10}" for cell in cells)


def is_generated(page: str) -> bool:
    return "do not edit" in "".join(page.splitlines(keepends=True)[:10])


def in_columns(cells: Sequence[str], num_columns: int) -> list[str]:
    """Return cells of equal width side by side, to be read column by column."""
    height = max(1, -(-len(cells) // num_columns))
    return ["    ".join(cells[first::height]).rstrip() for first in range(height)]


def num_lines(sources: Iterable[Source]) -> int:
    return sum(len(source.lines) for source in sources)


def rooms(house: House) -> Iterator[str]:
    """Yield files and lines of each room, the largest first."""
    members: dict[Path, list[Source]] = {}
    for source in house.product:
        members.setdefault(source.path.parent, []).append(source)
    cells = []
    for folder in sorted(members, key=lambda folder: -num_lines(members[folder])):
        files, lines = len(members[folder]), num_lines(members[folder])
        mark = "!" if files > MAX_FILES or lines > MAX_LINES else " "
        name = str(folder).removeprefix(f"{PRODUCT[0]}/")
        cells.append(f"{mark} {name:<24}{files:>4}{lines:>7,}")
    yield f"{len(cells)} rooms, with files and lines (!: over {MAX_FILES} files or {MAX_LINES:,} lines)"
    yield from in_columns(cells, 3)


def sums(house: House) -> Iterator[str]:
    """Yield files, lines and public names of each part."""
    parts = {folder: house.part(folder) for folder in PRODUCT}
    parts |= {"product": house.product, "site folders": house.stand_ins}
    parts |= {folder: house.part(folder) for folder in BESIDE}
    yield row("sums", "files", "lines", "classes", "functions", "names")
    for name, sources in parts.items():
        public = [node for source in sources for node in source.public]
        classes = sum(isinstance(node, ast.ClassDef) for node in public)
        yield row(name, len(sources), num_lines(sources), classes, len(public) - classes, len(public))


def num_config_keys(house: House) -> int | str:
    """Return the number of leaves in the schema, or "-" if no module has `known_keys`."""
    if (module := house.module_with("known_keys")) is None:
        return "-"
    sys.path.insert(0, str(house.root))
    return len(importlib.import_module(module).known_keys())


def docs(house: House) -> Iterator[str]:
    """Yield words of the docs, config keys and record types."""
    kinds: dict[str, list[str]] = {"docs/*.md": [], "pages of the root": [], "generated pages": []}
    for name, text in house.pages.items():
        kind = "generated pages" if is_generated(text) else "docs/*.md" if "/" in name else "pages of the root"
        kinds[kind].append(name)
    yield row("docs", "pages", "words")
    for kind, names in kinds.items():
        yield row(kind, len(names), sum(len(house.pages[name].split()) for name in names))
    yield row("config keys", num_config_keys(house))
    missing = house.missing_records()
    counts = [sum(name not in missing for name in names) for names in (RECORDS, OPTIONAL_RECORDS)]
    yield row("record types", *counts) + f"  from {RECORDS[0]} to {RECORDS[-1]}; more for options"


def functions(house: House) -> Iterator[str]:
    """Yield the longest functions of the product."""
    lengths = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name, f"{source.path}:{node.lineno}")
        for source in house.product
        for node in source.nodes
        if isinstance(node, Function)
    ]
    mean = sum(length for length, *_ in lengths) / max(1, len(lengths))
    num_long = sum(length > LONG_FUNCTION for length, *_ in lengths)
    yield f"{len(lengths):,} functions of {mean:.1f} lines, {num_long} of them over {LONG_FUNCTION}; the longest"
    for length, name, place in sorted(lengths, reverse=True)[:10]:
        yield f"{length:>6}  {name:<28}  {place}"


def wording(house: House) -> Iterator[str]:
    """Yield how often each phrase occurs in the product and in the docs."""
    source = "\n".join(source.text for source in house.product)
    text = "\n".join(source.words() for source in house.product)
    prose = " ".join(house.prose.split())
    cells = []
    for phrase in PHRASES:
        word = rf"\b{phrase}(?!\w)"
        counts = [len(re.findall(word, text, re.I)), len(re.findall(word, source)), len(re.findall(word, prose, re.I))]
        cells.append(f"  {phrase:<12}" + "".join(f"{count:>8,}" for count in counts))
    columns = "".join(f"{name:>8}" for name in ("text", "source", "docs"))
    yield f"{'wording':<14}{columns}    {'':<14}{columns}"
    yield from in_columns(cells, 2)


def wide_lines(house: House) -> Iterator[str]:
    """Yield how many lines are wide, by kind."""
    product, markdown = house.product, house.prose.splitlines()
    kinds = {
        "docstrings": [source.lines[number - 1] for source in product for number in source.docstring_lines()],
        "comments": [source.lines[number - 1] for source in product for number in source.comments],
        "all source": [line for source in product for line in source.lines],
        "Markdown": [line for line in markdown if not line.startswith("|")],
        "Markdown tables": [line for line in markdown if line.startswith("|")],
    }
    yield row(f"over {WIDE} characters", "lines", "of", "share")
    for kind, lines in kinds.items():
        num_wide = sum(len(line) > WIDE for line in lines)
        yield row(kind, num_wide, len(lines), f"{num_wide / max(1, len(lines)):.1%}")


def last_runs(house: House) -> Iterator[str]:
    """Yield cases and seconds of the last `make test`, by run and by layer."""
    layers: dict[str, list[float]] = {}
    yield row("tests", "cases", "seconds")
    for run in RUNS:
        file = house.root / ".cache" / f"tests-{run}.xml"
        if not file.is_file():
            yield row(run, "-", "-")
            continue
        (suite,) = ElementTree.parse(file).iter("testsuite")
        cases = list(suite.iter("testcase"))
        began = suite.get("timestamp", "")[:16].replace("T", " ")
        yield row(run, len(cases), round(float(suite.get("time", 0)))) + f"  on the clock, {began}"
        for case in cases:
            layer = case.get("classname", "").removeprefix("tests.").partition(".")[0]
            layers.setdefault(layer, []).append(float(case.get("time", 0)))
    for layer, seconds in layers.items():
        yield row(f"  layer {layer}", len(seconds), round(sum(seconds)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description="Measure the house on one page.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    house = House(parser.parse_args(arguments).root.resolve())
    for part in (rooms, sums, docs, functions, wording, wide_lines, last_runs):
        print(*part(house), "", sep="\n")
    if missing := house.missing_records():
        names = ", ".join(missing)
        print(f"No class of the product is called {names}: correct RECORDS in tests/house.py.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
