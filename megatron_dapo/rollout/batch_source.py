"""The source of a run's batches, as rank 0 of the trainer sees it; and a base without servers."""

from collections.abc import Callable
from typing import Protocol

from megatron_dapo.data.samples import RolloutBatch


def never() -> bool:
    """Return False: the caller is never asked to stop."""
    return False


class BatchSource(Protocol):
    """The trainer's calls; they block, one at a time."""

    def wait_ready(self) -> None:
        """Wait until batches can be asked for."""

    def next_batch(self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = never) -> RolloutBatch:
        """Return the groups and metrics of a step; its servers hold weight_version."""

    def refuse_batch(self) -> None:
        """Leave the last batch out of training: a resumed run samples it again."""

    def begin_evaluation(self, step: int, weight_version: int) -> None:
        """Have the held-out prompts answered; return at once."""

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Wait for the held-out answers and return their metrics."""

    def halt(self) -> None:
        """End sampling, so that `state_dict` has the unfinished responses too."""

    def state_dict(self) -> dict:
        """Return a checkpoint's part, as plain data."""

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved state."""

    def dump_stacks(self) -> None:
        """Have its process write its stacks to a log; return at once."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class NoServerRollout:
    """The calls of a BatchSource that need a server or a state: they do nothing.

    A batch is found by its step, so a run resumed after step 3 continues with the batch of step 4.
    """

    def __init__(self, source: str) -> None:
        """Keep the batches' name for messages about a checkpoint."""
        self._source = source

    def wait_ready(self) -> None:
        pass

    def refuse_batch(self) -> None:
        pass

    def begin_evaluation(self, step: int, weight_version: int) -> None:
        pass

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        return {}

    def halt(self) -> None:
        pass

    def state_dict(self) -> dict:
        """Return the name of the batches."""
        return {"replay": self._source}

    def load_state_dict(self, state: dict) -> None:
        """Accept the state of any rollout: only the step decides."""

    def dump_stacks(self) -> None:
        pass

    def close(self) -> None:
        pass
