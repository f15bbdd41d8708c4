"""The ranks of a job as the writing of checkpoints sees them: everybody's answer, and one error for all."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from megatron_dapo.checkpointing.errors import CheckpointError
from megatron_dapo.config import UserError

Result = TypeVar("Result")


class Ranks(Protocol):
    """rank: ours. gather: what every rank brings, in rank order, on all of them. Collective."""

    rank: int

    def gather(self, mine: Any) -> list: ...


class JobRanks:
    """All ranks of a ParallelLayout."""

    def __init__(self, layout) -> None:
        self.rank, self._layout = layout.rank, layout

    def gather(self, mine: Any) -> list:
        import torch.distributed as dist  # the files of checkpoints are also looked at where torch is not loaded

        everybodys: list = [None] * self._layout.world_size
        dist.all_gather_object(everybodys, mine, group=self._layout.cpu_group)
        return everybodys


class SingleRank:
    """A job of one process."""

    rank = 0

    def gather(self, mine: Any) -> list:
        return [mine]


def together(ranks: Ranks, what: str, work: Callable[[], Result] | None) -> list[Result | None]:
    """Every rank does its part (none = nothing), all learn all answers. `work` must not be collective itself.

    Where one fails, all raise, so that nobody waits for a rank that is gone: a UserError as it is, else CheckpointError
    with the ranks and their errors.
    """
    answer, error, mistakes, cause = None, None, [], None
    if work is not None:
        try:
            answer = work()
        except UserError as caught:
            mistakes = caught.sentences
        except Exception as caught:  # told to everybody below
            error, cause = f"{type(caught).__name__}: {caught}", caught
    answers = ranks.gather((answer, error, mistakes))
    if all_mistakes := [sentence for _, _, sentences in answers for sentence in sentences]:
        raise UserError(dict.fromkeys(all_mistakes))
    errors = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers) if text is not None]
    if errors:
        raise CheckpointError(f"{what} failed; {'; '.join(errors)}") from cause
    return [each for each, _, _ in answers]


def tell(ranks: Ranks, what: str, work: Callable[[], Result]) -> Result:
    """What rank 0 finds out, on every rank."""
    return together(ranks, what, work if ranks.rank == 0 else None)[0]
