"""The rollout as the ranks see it that do not lead: rank 0 asks for all of them."""

from collections.abc import Callable

from megatron_dapo.data.types import RolloutBatch


class RolloutFollower:
    """The calls of RolloutHandle, on a rank other than 0. Questions are rank 0's to ask (`Agreement.leader`)."""

    def wait_ready(self) -> None:
        """Nothing has to start here."""

    def next_batch(
        self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = lambda: False
    ) -> RolloutBatch:
        raise NotImplementedError("rank 0 asks for the batch")

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        raise NotImplementedError("rank 0 asks for the evaluation")

    def refuse_batch(self) -> None:
        """Rank 0 refuses it."""

    def state_dict(self) -> dict:
        """{}: rank 0 has the state."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Rank 0 loads it."""

    def dump_stacks(self) -> None:
        """There is no process of this rank's that could hang."""

    def close(self) -> None:
        """Nothing is open."""
