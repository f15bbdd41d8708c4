"""The errors of weight sync."""

from megatron_dapo.common.errors import SharedError


class WeightSyncError(SharedError):
    """A push failed. The message names the phase and the server's URL or the trainer's rank.

    A server that got only some of the weights bears UNFINISHED_VERSION: it takes the new version
    with the last.
    """
