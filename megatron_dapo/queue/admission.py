"""Limits the prompts to draw now. Pure: plain numbers in, plain numbers out.

The trainer pushes its weights once per rollout step. Before the first step it pushes version 0, or
after a resume the number of the last step. After step s it pushes version s, also in the critic's
warm-up. So servers hold version s - 1 when step s is asked for, and its tokens of version w have
the age s - 1 - w.
"""

import math
from collections.abc import Iterable

_MOST_DRAWS = 4  # open at once, over the places of the steps that may train on them
_NUM_DEVIATIONS = 1.5  # of a wave's groups with signal: one wave in 15 needs another


def batches_closed(may_carry_signal: Iterable[bool], *, num_kept: int, num_used: int, size: int, max_draws: int) -> int:
    """Return the most batches that these open draws can close.

    may_carry_signal: of each, in their order; False = it is finished and will be dropped. The batch
    being filled has num_kept groups of num_used draws. A batch is full at `size` groups
    (`data.train_batch_size`), and handed out short after max_draws.

    No outcome of the draws closes more. A batch that begins at draw i ends at its size-th kept draw
    or at draw i + max_draws, whichever comes first. A later beginning never ends it earlier, and
    neither does a dropped draw. So, batch by batch, the outcome "all that may" closes it first.
    """
    num_closed = 0
    for may in may_carry_signal:
        num_used += 1
        num_kept += may
        if num_kept == size or (num_kept and num_used >= max_draws):
            num_closed += 1
            num_kept = num_used = 0
    return num_closed


def may_draw(*, num_steps: int, num_batches: int, version: int, max_staleness: int, total_steps: int) -> bool:
    """Return whether one more prompt may be drawn: whether its step is near enough.

    With this rule no token gets older than max_staleness versions:

        num_steps + num_batches < min(version + 1 + max_staleness, total_steps)

    Args:
        num_steps: number of the last step handed to the trainer.
        num_batches: the most that come before the prompt's own: those waiting, and the
            `batches_closed` of the open draws.
        version: of the weights confirmed by all servers in use; versions of the next push come
            later.
        max_staleness: the bound K.
        total_steps: of the run: nothing is drawn that no step would train on.

    The bound: a prompt drawn now is trained on in a step
    s <= num_steps + num_batches + 1 <= version + 1 + K, as draws keep their order. Later events only
    lower the sum: a draw without signal closes less, a step handed out counts once on either side.
    None of the prompt's tokens is older than `version`: their age is s - 1 - version <= K. The rule
    looks at the number of the step and not at totals of the run, so that it holds after a resume
    too.

    No deadlock: the trainer waits for step num_steps + 1 <= total_steps after a push of version
    num_steps. So the right side is at least num_steps + 1. A prompt may be drawn as long as no batch
    waits and the open draws cannot close one.
    """
    return num_steps + num_batches < min(version + 1 + max_staleness, total_steps)


def most_open(*, size: int, max_staleness: int) -> int:
    """Return the most draws that may be open at once: 4 (K + 1) `size`.

    Dropped draws behind a late head take no place, but memory and prompts. Nothing is stuck at this
    limit: the head is among those that may be sampled.
    """
    return _MOST_DRAWS * (max_staleness + 1) * size


def wave_size(*, size: int, num_ready: int, gen_batch_size: int, acceptance: float) -> int:
    """Return the number of prompts to draw at once for a step.

    Only with `max_staleness` 0 and nothing open. It is the smallest number that gives the missing
    groups even 1.5 standard deviations (binomial) below its mean, at most gen_batch_size. Another
    wave for a few groups takes the time of this one's longest response; some more prompts cost
    little.

    Args:
        size: groups per step.
        num_ready: the step's groups so far.
        gen_batch_size: the most draws at once.
        acceptance: share of groups with signal, 0 to 1; 0 = none was seen yet.

    n a - z sqrt(n a (1 - a)) = missing is a quadratic equation in sqrt(n).
    """
    missing = size - num_ready
    if missing <= 0:
        return 0
    if acceptance <= 0:
        return gen_batch_size
    half = _NUM_DEVIATIONS * math.sqrt(acceptance * (1 - acceptance)) / 2
    root = (half + math.sqrt(half**2 + acceptance * missing)) / acceptance
    return min(math.ceil(root**2 - 1e-9), gen_batch_size)
