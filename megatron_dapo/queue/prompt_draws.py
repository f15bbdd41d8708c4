"""Draws prompts one by one: the data set's next ones and, with experience replay, earlier ones."""

from megatron_dapo.data.prompt_cursor import Cursor, spread
from megatron_dapo.data.samples import Sample
from megatron_dapo.queue.experience_replay import ExperiencePool
from megatron_dapo.queue.plain_data import sample_from_plain, sample_to_plain


class PromptDraws:
    """The order of the draws.

    Without a pool it is the cursor's. With one, blocks of `block_size` new and replayed prompts are
    dealt one by one; the rest of a block is part of the state. A replayed prompt is left out if it
    was solved after its block was made.
    """

    def __init__(self, cursor: Cursor, pool: ExperiencePool | None, block_size: int) -> None:
        self._cursor = cursor
        self._pool = pool
        self._block_size = block_size
        self._block: list[tuple[int, Sample | None]] = []  # the rest of it

    def next(self) -> tuple[int, Sample | None]:
        """Return the next prompt's number and its borrowed trajectory, None for a new prompt."""
        while True:
            if not self._block:
                self._block = next_prompts(self._cursor, self._pool, self._block_size if self._pool else 1)
            number, replayed = self._block.pop(0)
            if replayed is None or self._pool is None or not self._pool.is_retired(number):
                return number, replayed

    @property
    def replayed_later(self) -> list[int]:
        """Return the replayed prompts in the rest of the block."""
        return [number for number, replayed in self._block if replayed is not None]

    def state_dict(self) -> dict:
        """Return plain data: the cursor, and the rest of the block."""
        block = [[number, sample and sample_to_plain(sample)] for number, sample in self._block]
        return {"cursor": self._cursor.state_dict(), "block": block}

    def load_state_dict(self, state: dict) -> None:
        """Continue from saved draws.

        Raises UserError, before any change, for other prompts' cursor.
        """
        self._cursor.load_state_dict(state["cursor"])
        self._block = [(number, sample and sample_from_plain(sample)) for number, sample in state["block"]]


def next_prompts(cursor: Cursor, pool: ExperiencePool | None, size: int) -> list[tuple[int, Sample | None]]:
    """Return the next `size` prompts by number, each with its group's borrowed trajectory, if any.

    Replayed prompts are spread evenly among the new ones, so that neither kind is left over for the
    next step. Both the cursor and the pool move on: a gen batch is drawn once.
    """
    replayed = pool.draw(size) if pool else []
    new: list[tuple[int, Sample | None]] = [(number, None) for number in cursor.next(size - len(replayed))]
    return spread(replayed, new)
