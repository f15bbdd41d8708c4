"""Repetitions of a test that proves a thing once: few in `make test`,
all of them in `make proofs`."""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

PROOFS = bool(os.environ.get("PROOFS"))
"""Whether this is `make proofs`."""

proof = pytest.mark.proof
"""Marks a test of `make proofs` alone: a second form of what another test shows each time."""

Case = TypeVar("Case")


def amount(short: int, proof: int) -> int:
    """Return the number of repetitions: `short`, or `proof` if PROOFS is set."""
    return proof if PROOFS else short


def few(cases: Sequence[Case], number: int) -> Sequence[Case]:
    """Return the first cases, all of them if PROOFS is set."""
    return cases if PROOFS else cases[:number]


def covering(cases: Sequence[str]) -> Sequence[str]:
    """Return fewer cases, all of them if PROOFS is set.

    cases: "layout/variant" as "tp2_pp2/kl/small". Each part of a variant's name still meets each
    kind of parallelism that it met, and each layout has a case; "tp1", one process, keeps all.
    Layouts of many kinds come first: one of their cases stands for several of simpler ones.
    """
    if PROOFS:
        return cases
    met: set[tuple[str, str]] = set()
    kept = [case for case in cases if case.startswith("tp1/")]
    several = (case for case in cases if not case.startswith("tp1/"))
    for case in sorted(several, key=lambda case: -case.partition("/")[0].count("_")):
        layout, *parts = case.split("/")
        pairs = {(kind.rstrip("0123456789"), part) for kind in layout.split("_") for part in (*parts, layout)}
        if pairs - met:
            kept.append(case)
            met |= pairs
    return kept
