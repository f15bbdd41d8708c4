"""Published runs of other programs beside a plan's time for them: the table of docs/plan.md.

python -m benchmarks.compare_published
"""

import sys
from collections.abc import Iterator

from rich.console import Console

from benchmarks.published_runs import RUNS, planned
from benchmarks.report import plain_table


def comparison() -> Iterator[tuple[str, str, float, float]]:
    """Yield (run, part, published seconds, estimated seconds).

    A part that served to choose the run's lengths is no check, and left out.
    """
    for run in RUNS:
        estimate = planned(run)
        for part, seconds in run.published.items():
            if run.total_length is not None or part != "score":
                yield run.name, part, seconds, estimate[part]


def main() -> int:
    table = plain_table("published runs", ("run", "part", "published s", "estimate s", "ratio"))
    for name, part, seconds, estimate in comparison():
        table.add_row(name, part, f"{seconds:g}", f"{estimate:.0f}", f"{estimate / seconds:.2f}")
    Console(highlight=False, width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
