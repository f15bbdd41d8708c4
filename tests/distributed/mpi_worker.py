"""An MPI job that ends in one way or another, without a trainer: python mpi_worker.py SCENARIO"""

import os
import sys
import time

from launch import mpi

mpi.LAST_WORDS_S = 1.0


def told_variables(place: mpi.RankVariables) -> int:
    print(" ".join(f"{name}={os.environ[name]}" for name in place.variables()), flush=True)
    return 0


def slow_save(place: mpi.RankVariables) -> int:
    """Rank 0 is done at once, rank 1 still saves."""
    time.sleep(1.0 * place.rank)
    print(f"rank {place.rank} saved", flush=True)
    return 85


def one_fails(place: mpi.RankVariables) -> int:
    if place.rank == 1:
        raise RuntimeError("the cause")
    time.sleep(120)
    return 0


if __name__ == "__main__":
    here = mpi.bootstrap()
    sys.exit(mpi.run_and_wait(lambda: globals()[sys.argv[1]](here)))
