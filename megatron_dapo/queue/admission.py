"""Limits the prompts to draw now. Pure: plain numbers in, plain numbers out.

The trainer pushes its weights once per rollout step. Before the first step it pushes version 0, or
after a resume the number of the last step. After step s it pushes version s, also in the critic's
warm-up. So servers hold version s - 1 when step s is asked for, and its tokens of version w have
the age s - 1 - w.
"""

import math

_NUM_DEVIATIONS = 1.5  # of a wave's groups with signal: one wave in 15 needs another


def paced(
    *, num_steps: int, size: int, num_ready: int, num_open: int, version: int, max_staleness: int, total_steps: int
) -> bool:
    """Return whether one more prompt may be drawn.

    With this rule no token gets older than max_staleness versions:

        num_steps * size + num_ready + num_open
            < min(version + 1 + max_staleness, total_steps) * size

    Args:
        num_steps: number of the last step handed to the trainer.
        size: groups per step (`data.train_batch_size`).
        num_ready: waiting groups with signal; a batch closed short counts as `size`
            (`GroupQueue.num_ready`).
        num_open: draws without a decision about their signal yet.
        version: of the weights confirmed by all servers in use; versions of the next push come
            later.
        max_staleness: the bound K.
        total_steps: of the run: nothing is drawn that no step would train on.

    The bound: steps take groups in the order of their draws, `size` each. So a prompt drawn now is
    at most group number (version + 1 + K) * size, and is trained on in a step s <= version + 1 + K.
    A dropped group only moves the groups behind it forward. None of the prompt's tokens is older
    than `version`: their age is s - 1 - version <= K. The rule looks at the number of the step and
    not at totals of the run, so that it holds after a resume too.

    No deadlock: the trainer waits for step num_steps + 1 <= total_steps after a push of version
    num_steps. So the right side is at least (num_steps + 1) * size. A prompt may be drawn as long
    as ready and open groups do not fill the step.
    """
    return num_steps * size + num_ready + num_open < min(version + 1 + max_staleness, total_steps) * size


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
