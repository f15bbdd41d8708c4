"""What stands for the controller and its servers in a run that has none."""

from collections.abc import Callable

from megatron_dapo.data.samples import RolloutBatch


class NoServerRollout:
    """The calls of RolloutHandle where batches come from elsewhere than from servers: a subclass gives them.

    A batch is found by its step, so a run that resumes at step 4 takes those of 4 and later, and there is no state.
    source: what the batches are, as messages about a checkpoint name them.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def wait_ready(self) -> None:
        """Return at once: nothing has to start."""

    def next_batch(
        self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = lambda: False
    ) -> RolloutBatch:
        """Return the step's groups and metrics."""
        raise NotImplementedError

    def begin_evaluation(self, step: int, weight_version: int) -> None:
        """Do nothing: held-out prompts need a server."""

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Return {}: held-out prompts need a server."""
        return {}

    def refuse_batch(self) -> None:
        """Do nothing: a resumed run takes the batch again in any case."""

    def halt(self) -> None:
        """Do nothing: nothing is under way."""

    def state_dict(self) -> dict:
        """Return which batches are trained on."""
        return {"replay": self._source}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing, whatever rollout wrote the state: the run goes on with the batch of the next step."""

    def dump_stacks(self) -> None:
        """Do nothing: there is no process that could hang."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
