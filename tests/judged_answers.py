"""Answers judged one by one, with the verdicts of math-verify 0.9.0, verl 0.9.1 and slime's rule.

`python -m tests.judged_answers` prints those with any verdict other than the judgement.

The judgement is by mathematics. Order counts in tuples, not in sets or lists. A unit behind the
number is no mistake. 50% is 50 and 0.5. A decimal stands for a fraction from six right places on.
Words are equal in any case.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "unit" / "data" / "judged_answers.tsv"
OTHERS = {
    "math_verify": "math-verify alone",
    "verl_math": "verl for lighteval/MATH, MATH-500",
    "verl_numina": "verl for numina_*",
    "verl_dapo": "verl for math_dapo, aime*",
    "slime_math": "slime's --rm-type math",
}
_WHOLE_RESPONSES = ("line", "where", "comment")


@dataclass(frozen=True)
class Judged:
    """An answer to a question with this ground truth. others: verdicts; None: it raised or took
    over 10 s."""

    kind: str
    truth: str
    answer: str
    right: bool
    others: dict[str, bool | None]

    @property
    def response(self) -> str:
        """Return the response that everyone but verl's math_dapo was asked about."""
        return self.answer if self.kind in _WHOLE_RESPONSES else f"\\boxed{{{self.answer}}}"

    @property
    def line(self) -> str:
        """Return the response that verl's math_dapo was asked about."""
        return self.answer if self.kind in _WHOLE_RESPONSES else f"Answer: {self.answer}"


def judged_answers() -> list[Judged]:
    """Return the rows of the table."""
    verdicts = {"1": True, "0": False}
    with TABLE.open() as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [
            Judged(
                row["kind"],
                row["truth"],
                row["answer"],
                row["right"] == "1",
                {name: verdicts.get(row[name]) for name in OTHERS},
            )
            for row in rows
        ]


def _print_differences() -> None:
    rows = judged_answers()
    for name, what in OTHERS.items():
        differing = [row for row in rows if row.others[name] != row.right]
        accepted = sum(row.others[name] is True for row in differing)
        print(f"{what}: {len(differing)} of {len(rows)} differ, {accepted} wrong ones accepted")
        for row in differing:
            print(f"  {'right' if row.right else 'wrong'}  {row.truth}  <-  {row.answer}")


if __name__ == "__main__":
    _print_differences()
