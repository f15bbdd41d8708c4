"""The errors of weight sync."""


class WeightSyncError(RuntimeError):
    """A push failed. The message names the phase and the server's URL or the trainer's rank.

    The servers' weights are then undefined until a later push succeeds.
    """


class RanksMissing(WeightSyncError):
    """Not all trainer ranks came: there is nobody to agree with on how to go on."""
