"""The verdicts on the responses to one prompt by a reward function that scores them together."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from megatron_dapo.rewards.reward_result import RewardResult


class GroupVerdicts:
    """Responses wait here for the last one; then all are scored."""

    def __init__(
        self, score: Callable[[Sequence[str]], Awaitable[list[RewardResult]]], texts: Mapping[int, str], num_new: int
    ) -> None:
        """Prepare.

        score: scores all texts, in the order of the responses' numbers.
        texts: by number, of responses with a verdict already that count in the others' verdicts.
        num_new: responses to come.
        """
        self._score = score
        self._texts = dict(texts)
        self._num_before = len(texts)
        self._num_missing = num_new
        self._results: asyncio.Future[dict[int, RewardResult]] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task | None = None

    async def verdict(self, number: int, text: str) -> RewardResult:
        """Return the verdict on a response once all are there.

        Raises the reason of `give_up`, or score's error.
        """
        self._texts[number] = text
        self._note_one()
        return (await asyncio.shield(self._results))[number]

    def leave_out(self) -> None:
        """Wait for one response less: its environment gave the verdict."""
        self._note_one()

    def give_up(self, reason: BaseException) -> None:
        """Raise the reason in all waiting calls: a response does not come."""
        if not self._results.done():
            self._results.set_exception(reason)
            self._results.exception()  # nobody may be waiting

    def close(self) -> None:
        """End the scoring, if it is under way."""
        if self._task is not None:
            self._task.cancel()

    def _note_one(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0 and len(self._texts) > self._num_before:
            self._task = asyncio.create_task(self._score_all())

    async def _score_all(self) -> None:
        try:
            numbers = sorted(self._texts)
            results = await self._score([self._texts[number] for number in numbers])
        except Exception as error:
            self.give_up(error)
        else:
            if not self._results.done():
                self._results.set_result(dict(zip(numbers, results, strict=True)))
