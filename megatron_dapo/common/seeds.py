"""Seeds derived from a run's seed, and the process-wide random generators of Python and numpy."""

import hashlib
import random
import sys

_NUMPY_SEEDS = 2**32


def seed_from(*parts: int | str) -> int:
    """Return a seed in [0, 2^63): equal for equal parts on every machine, different for others."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed Python's generator, and numpy's if it is imported: not every worker needs numpy."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % _NUMPY_SEEDS)
