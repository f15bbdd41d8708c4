"""Reward functions that need no more than text: `math_dapo`, `exact_match`, `environment`.
Microseconds each."""

import re

from megatron_dapo.rewards.answers import last_answer_line, last_boxed, normalize
from megatron_dapo.rewards.exact import as_written, exact_number
from megatron_dapo.rewards.reward_result import Verdict

_PADDED_INTEGER = re.compile(r"-?\d+(?:\.0*)?")
_MINERVA_TAIL_CHARS = 300  # the longest answer of MATH-500 has 159


def math_dapo(
    data_source: str, response: str, ground_truth: str, extra_info: dict, *, boxed_fallback: bool = False
) -> Verdict:
    r"""Return +1 for the right final answer, -1 for any other: the rule of the DAPO recipe (arXiv
    2503.14476).

    The last `Answer: ...` line of the response's last 300 characters, in Minerva's normal form,
    must equal the ground truth's normal form. An integer written as 034 or 34.0 in a table is 34,
    too. An answer with an empty normal form (`square`) must be the ground truth as written.

    Args:
        boxed_fallback: without such a line, read the last `\boxed{...}`; the public recipe did not
            do this, and it raises early rewards.
    """
    tail = response[-_MINERVA_TAIL_CHARS:]
    answer = last_answer_line(tail)
    if answer is None and boxed_fallback:
        answer = last_boxed(tail)
    if answer is None:
        return {"score": -1.0, "correct": False, "pred": None}
    said = normalize(answer)
    correct = said in (normalize(ground_truth), _as_integer(ground_truth))
    if not any(map(str.isalnum, said)):
        # the normal form of "square" is empty, too, and of "a ," a comma
        correct = correct and as_written(answer) == as_written(ground_truth)
    return {"score": 1.0 if correct else -1.0, "correct": correct, "pred": said}


def _as_integer(ground_truth: str) -> str | None:
    number = exact_number(ground_truth) if _PADDED_INTEGER.fullmatch(ground_truth.strip()) else None
    return None if number is None else str(number)


def environment(data_source: str, response: str, ground_truth: str, extra_info: dict) -> Verdict:
    """Return 0: an environment or an agent gives the reward; a trajectory without one has earned
    none."""
    return {"score": 0.0, "correct": False}


def exact_match(
    data_source: str,
    response: str,
    ground_truth: str,
    extra_info: dict,
    *,
    marker: str = "",
    strip: bool = True,
    ignore_case: bool = False,
) -> Verdict:
    """Return 1 if the response is the ground truth, else 0.

    Args:
        marker: compare only the text after the last marker; a response without it is wrong.
        strip: ignore white space around both.
        ignore_case: compare case-folded.
    """
    _, has_marker, answer = response.rpartition(marker) if marker else ("", True, response)
    truth = ground_truth
    if strip:
        answer = answer.strip()
        truth = truth.strip()
    if ignore_case:
        answer = answer.casefold()
        truth = truth.casefold()
    correct = bool(has_marker) and answer == truth
    return {"score": 1.0 if correct else 0.0, "correct": correct, "pred": answer if has_marker else None}


def none(data_source: str, response: str, ground_truth: str, extra_info: dict) -> Verdict:
    """Return 0, not correct: only `reward.model` scores."""
    return {"score": 0.0, "correct": False}
