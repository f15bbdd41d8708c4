"""The errors of weight sync."""

from megatron_dapo.common.errors import SharedError


class WeightSyncError(SharedError):
    """A push failed. The message names the phase and the server's URL or the trainer's rank.

    A server with only some of the weights reports UNFINISHED_VERSION: the last bucket brings the
    new version.
    """
