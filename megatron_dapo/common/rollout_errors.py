"""Errors of a rollout, besides mistakes of the user."""

from typing import ClassVar

from megatron_dapo.common.ends import EndKind
from megatron_dapo.common.errors import SharedError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, MISMATCH_EXIT_CODE


class RolloutError(SharedError):
    """Servers, rewards or the controller failed for good; the message names who.

    end_kind, exit_code: of the ranks that it ends.
    """

    end_kind: ClassVar[EndKind] = EndKind.ROLLOUT_FAILED
    exit_code: ClassVar[int] = FAILED_EXIT_CODE


class ServersLost(RolloutError):
    """No server answers any more."""

    end_kind = EndKind.SERVERS_LOST


class ServersMissing(RolloutError):
    """Servers did not get healthy in time at the start."""


class ForeignSamples(RolloutError):
    """The servers' log-probs disagree with the trainer's weights; the batch is not trained on."""

    end_kind = EndKind.MISMATCH
    exit_code = MISMATCH_EXIT_CODE


class Aborted(Exception):
    """Sampling was asked to end before a response was finished."""


class Interrupted(RolloutError):
    """A step was asked to stop before its groups were complete; finished groups stay in the
    rollout's state."""


class NeedsSync(RolloutError):
    """No server holds the requested weights: push them and ask again; nothing is lost."""
