"""Training on dumped batches again, without servers: bugs reproduced, layouts compared."""

from pathlib import Path

from megatron_dapo.config import Config
from megatron_dapo.data.types import RolloutBatch
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.rollout.handle import RolloutHandle


def start_rollout(config: Config) -> "RolloutHandle | Replay":
    """Where the run's batches come from: dumped ones with `trainer.replay`, else a controller, which starts."""
    return Replay(config.trainer.replay) if config.trainer.replay else RolloutHandle.start(config)


class Replay:
    """Dumped batches in place of a controller and its servers: the calls of RolloutHandle.

    A batch is found by its step, so a run that resumes at step 4 takes those of 4 and later, and there is no state.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def wait_ready(self) -> None:
        """At once: nothing has to start."""

    def next_batch(self, step: int, weight_version: int) -> RolloutBatch:
        """The step's groups and metrics as they were dumped. Raises UserError for a batch that is missing or damaged.

        weight_version: not used; the tokens keep the versions of the weights that wrote them.
        """
        return read_batch(self._folder, step)

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """{}: held-out prompts need a server."""
        return {}

    def state_dict(self) -> dict:
        return {"replay": str(self._folder)}

    def load_state_dict(self, state: dict) -> None:
        """Whatever rollout wrote the state: a replay goes on with the batch of the next step."""

    def close(self) -> None:
        """Nothing is open."""
