"""How far a run has come, as its newest checkpoint says."""

import zlib
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.checkpointing.folders import newest_first, read_controller_state, step_of
from megatron_dapo.checkpointing.rollout_state import num_groups_under_way, num_tokens_under_way
from megatron_dapo.storage.run_folder import RunFolder


@dataclass(frozen=True, order=True)
class Progress:
    """The progress of a run."""

    step: int = 0
    """Finished rollout steps."""
    num_groups: int = 0
    """Finished groups of the next step, of a run stopped while sampling."""
    num_tokens: int = 0
    """Of the responses in its unfinished groups."""


BEGINNING = Progress()


def progress(run: str) -> Progress:
    """Return the progress of the newest checkpoint by name.

    The trainer checks whether that checkpoint is whole.
    """
    folders = newest_first(RunFolder(Path(run)).checkpoints)
    if not folders:
        return BEGINNING
    try:
        state = read_controller_state(folders[0])
        sampled = num_groups_under_way(state), num_tokens_under_way(state)
    except (OSError, ValueError, EOFError, zlib.error):  # damaged, or without a rollout's state
        sampled = 0, 0
    return Progress(step_of(folders[0]) or 0, *sampled)
