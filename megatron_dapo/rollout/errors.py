"""What can go wrong with a rollout, besides mistakes of the user."""

from megatron_dapo.common.errors import SharedError


class RolloutError(SharedError):
    """Servers, rewards or the controller failed for good; the message names who."""


class ForeignSamples(RolloutError):
    """Servers wrote what the trainer's weights would not: that batch is not trained on."""


class Interrupted(RolloutError):
    """A step was asked to stop before it had its groups: what is finished stays in the rollout's state."""


class NeedsSync(RolloutError):
    """No server holds the weights that were asked for: push them and ask again, nothing was lost."""
