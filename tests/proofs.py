"""Repetitions of a test that proves a thing once: few in `make test`,
all of them in `make proofs`."""

import os


def amount(short: int, proof: int) -> int:
    """Return the number of repetitions: `short`, or `proof` if PROOFS is set."""
    return proof if os.environ.get("PROOFS") else short
