"""One reward function of each form, on the same responses, with the responses scored per second.

python -m examples.reward_forms.forms [NUM_RESPONSES]
"""

import asyncio
import sys
import time
from collections.abc import Sequence

from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_result import RewardResult

TRUTH = "12"
RESPONSES = ("12", "6 + 6 = 12", "twelve", "13")
WAIT_S = 0.05  # of a call of `judged`: a server's time to answer


def plain(data_source, response, ground_truth, extra_info):
    """Score one response."""
    return response.endswith(ground_truth)


def ranked(data_source, responses, ground_truth, extra_info):
    """Score all responses to a prompt: the shortest right one gets most."""
    right = sorted({response for response in responses if response.endswith(ground_truth)}, key=len)
    return [
        {"score": 1 / (1 + right.index(response)) if response in right else 0.0, "correct": response in right}
        for response in responses
    ]


def batched(data_sources, responses, ground_truths, extra_infos):
    """Score a batch of responses to any prompts."""
    return [response.endswith(truth) for response, truth in zip(responses, ground_truths, strict=True)]


async def judged(data_source, response, ground_truth, extra_info):
    """Score one response by a slow judge."""
    await asyncio.sleep(WAIT_S)
    return response.endswith(ground_truth)


async def results_of(function: str, responses: Sequence[str]) -> tuple[list[RewardResult], float]:
    """Return the results of a function of this module on the responses to one prompt, and the
    seconds."""
    pool = RewardPool(f"{__spec__.name}:{function}", {}, num_workers=1, timeout_s=60.0, memory_limit_mb=2048)
    await pool.start()
    try:
        began = time.perf_counter()
        if pool.scores_groups:
            results = await pool.score_group("any", responses, TRUTH)
        else:
            results = await asyncio.gather(*(pool.score("any", response, TRUTH) for response in responses))
        return results, time.perf_counter() - began
    finally:
        await pool.close()


def main() -> None:
    """Print the table."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    responses = [RESPONSES[place % len(RESPONSES)] for place in range(number)]
    print(f"{'function':<10}{'responses/s':>12}   scores of {', '.join(map(repr, RESPONSES))}")
    for function in ("plain", "ranked", "batched", "judged"):
        results, seconds = asyncio.run(results_of(function, responses))
        scores = ", ".join(f"{result.score:g}" for result in results[: len(RESPONSES)])
        print(f"{function:<10}{number / seconds:>12.0f}   {scores}")


if __name__ == "__main__":
    main()
