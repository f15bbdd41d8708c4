"""The errors of weight sync."""


class WeightSyncError(RuntimeError):
    """A push failed. The message names the phase and the server's URL or the trainer's rank.

    A server that got only some of the weights bears the version that it had before: it takes the new one with the last.
    """


class RanksMissing(WeightSyncError):
    """Not all trainer ranks came: there is nobody to agree with on how to go on."""
