"""The rollout as the ranks see it that do not lead: rank 0 asks for all of them."""

from collections.abc import Callable

from megatron_dapo.data.samples import RolloutBatch


class RolloutFollower:
    """The calls of RolloutHandle, on a rank other than 0. Questions are rank 0's to ask (`Agreement.leader`)."""

    def wait_ready(self) -> None:
        """Return at once, because nothing has to start here."""

    def next_batch(
        self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = lambda: False
    ) -> RolloutBatch:
        raise NotImplementedError("rank 0 asks for the batch")

    def begin_evaluation(self, step: int, weight_version: int) -> None:
        raise NotImplementedError("rank 0 asks for the evaluation")

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        raise NotImplementedError("rank 0 asks for the evaluation")

    def refuse_batch(self) -> None:
        """Do nothing, because rank 0 refuses the batch."""

    def halt(self) -> None:
        """Do nothing, because rank 0 has the controller."""

    def state_dict(self) -> dict:
        """Return {}, because rank 0 has the state."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing, because rank 0 loads the state."""

    def dump_stacks(self) -> None:
        """Do nothing, because this rank has no process that could hang."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""
