"""The position of a trainer rank in the parallel layout."""

from typing import NamedTuple


class RankCoordinates(NamedTuple):
    """A rank's index along each axis of the layout. Read by name: everyone has another order in
    mind."""

    dp: int
    pp: int
    tp: int
    cp: int = 0
