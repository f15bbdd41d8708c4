"""Any task of reasoning-gym over several turns: a wrong answer may be corrected."""

from megatron_dapo.envs.environment import Observation, Task
from megatron_dapo.rewards import reasoning_gym_reward as reasoning_gym


class ReasoningGym:
    """Tasks of the package: reward 1 for a right answer, on whichever attempt; else 0.

    The task is the data source, `reasoning_gym/TASK`.

    attempts: answers per trajectory. discount: factor of the reward for every wrong answer before
    the right one.
    """

    def __init__(self, attempts: int = 3, discount: float = 1.0) -> None:
        self._attempts = attempts
        self._discount = discount
        self._num_wrong = 0
        self._task: Task | None = None

    async def reset(self, task: Task) -> Observation:
        """Begin the task."""
        self._task = task
        return Observation()

    async def step(self, response: str) -> Observation:
        """Answer a turn of the model."""
        task = self._task
        assert task is not None, "reset() comes before step()"
        verdict = reasoning_gym.reasoning_gym(task.data_source, response, task.ground_truth, task.extra_info)
        if verdict["correct"]:
            return Observation(done=True, reward=self._discount**self._num_wrong, correct=True)
        self._num_wrong += 1
        if self._num_wrong >= self._attempts:
            return Observation(done=True, reward=0.0, correct=False)
        return Observation(({"role": "user", "content": "That is not right. Try again."},), reward=0.0, correct=False)

    async def close(self) -> None:
        """Do nothing, because nothing is open."""
