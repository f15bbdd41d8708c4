"""The ranks of a job: everybody's answer, and one error for all, so that nobody waits for a rank that has failed."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from megatron_dapo.common.errors import UserError

Result = TypeVar("Result")


class JobError(RuntimeError):
    """Something failed that is no mistake of the user: a full disk, a writer that died. On every rank alike."""


class Ranks(Protocol):
    """rank: ours. gather: what every rank brings, in rank order, on all of them. Collective."""

    rank: int

    def gather(self, mine: Any) -> list: ...


class SingleRank:
    """A job of one process."""

    rank = 0

    def gather(self, mine: Any) -> list:
        return [mine]


def together(ranks: Ranks, what: str, work: Callable[[], Result] | None) -> list[Result | None]:
    """Every rank does its part (none = nothing), all learn all answers. `work` must not be collective itself.

    Where one fails, all raise: a UserError with all ranks' sentences, else JobError with the ranks and their errors.
    """
    answer, error, mistakes, cause = None, None, [], None
    if work is not None:
        try:
            answer = work()
        except UserError as caught:
            mistakes = caught.sentences
        except Exception as caught:  # told to everybody below
            error, cause = describe(caught), caught
    answers = ranks.gather((answer, error, mistakes))
    if all_mistakes := [sentence for _, _, sentences in answers for sentence in sentences]:
        raise UserError(dict.fromkeys(all_mistakes))
    errors = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers) if text is not None]
    if errors:
        raise JobError(f"{what} failed; {'; '.join(errors)}") from cause
    return [each for each, _, _ in answers]


def tell(ranks: Ranks, what: str, work: Callable[[], Result]) -> Result:
    """What rank 0 finds out, on every rank."""
    return together(ranks, what, work if ranks.rank == 0 else None)[0]


def describe(error: BaseException) -> str:
    """An error on one line; the operating system's own words where it began with them: torch reports a full disk as a
    wrong position in a file."""
    began: BaseException | None = error
    while began is not None and not isinstance(began, OSError):
        began = began.__cause__ or began.__context__
    text = " ".join(str(began or error).split()) or type(error).__name__
    return text if began is not None else f"{type(error).__name__}: {text}"
