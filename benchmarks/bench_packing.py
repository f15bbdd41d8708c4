"""The schedule of one mini-batch: rank 0's seconds, the fill of micro-batches, the balance of work.

Lengths are log-normal, the cost of a sequence is that of Qwen2.5-32B, and the cap is its recipe's:
one sample of full length. The best possible fill follows only from whole numbers. Every rank has
the same number of micro-batches, at least the samples' tokens / (ranks x cap), rounded up.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from benchmarks.measure import timed
from benchmarks.report import plain_table, written
from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.data.batching import CostModel, TrainSample
from megatron_dapo.data.packing import schedule

CAP = 22528
PAD_MULTIPLE = 8
COST = CostModel.of_decoder(
    hidden_size=5120, ffn_size=27648, attention_weights=5120 * 128 * 2 * (40 + 8), attention_width=40 * 128
)
LONGEST = 20480
ROUNDS = 5
CPU = torch.device("cpu")


class Case(NamedTuple):
    """The samples of one mini-batch on dp_size ranks, packed or as rectangles."""

    num_samples: int
    dp_size: int
    packed: bool = True


TIMED = [Case(n, *how) for n in (2048, 8192, 16384, 32768) for how in ((1,), (16,), (1, False))]
FILLED = [Case(n, dp_size) for n in (512, 8192) for dp_size in (1, 4, 8, 16)]
QUICK_TIMED = [Case(64, 1), Case(64, 2, False)]
QUICK_FILLED = [Case(64, 2)]


def samples_of(num_samples: int) -> list[TrainSample]:
    """Return samples read only for their lengths: log-normal, median 3.6 k tokens."""
    lengths = np.clip(np.random.default_rng(0).lognormal(8.2, 0.9, num_samples), 64, LONGEST).astype(int)
    nothing, integers = np.zeros(LONGEST, dtype=np.float32), np.zeros(LONGEST, dtype=np.int64)
    return [
        TrainSample(
            sample_id=i,
            uid=str(i),
            tokens=integers[:length],
            loss_mask=nothing[:length],
            rollout_log_probs=nothing[:length],
            advantage=0.0,
            weight_versions=integers[:length],
        )
        for i, length in enumerate(lengths)
    ]


def plan_of(case: Case, samples: Sequence[TrainSample]) -> list[list[list[TrainSample]]]:
    return schedule(
        samples,
        dp_size=case.dp_size,
        max_tokens=CAP,
        pad_multiple=PAD_MULTIPLE,
        packed=case.packed,
        cost=COST,
    )


def measured(case: Case, rounds: int) -> dict:
    """Return the case with the median of its seconds."""
    print(f"packing: measuring {case}", file=sys.stderr)
    samples = samples_of(case.num_samples)
    seconds = []
    for _ in range(rounds):
        # of the benchmark's own garbage: a collection due then would fall into the time
        gc.collect()
        seconds.append(timed(CPU, lambda: plan_of(case, samples))[1])
    return {**case._asdict(), "rounds": rounds, "seconds": statistics.median(seconds)}


def filled(case: Case) -> dict:
    """Return the case with its micro-batches per rank, fills, and highest costs over the mean.

    fewest: the smallest number with room for the tokens, under any schedule; best_fill: the fill
    with it.
    microbatches_max_over_mean: on the rank with the highest.
    """
    samples = samples_of(case.num_samples)
    costs = np.array([[sum(COST(s.length) for s in bin_) for bin_ in rank] for rank in plan_of(case, samples)])
    num_tokens = sum(sample.length for sample in samples)
    tokens_per_round = case.dp_size * CAP
    num_microbatches = costs.shape[1]
    fewest = ceil_div(num_tokens, tokens_per_round)
    of_ranks = costs.sum(axis=1)
    return {
        **case._asdict(),
        "num_tokens": num_tokens,
        "num_microbatches": num_microbatches,
        "fewest": fewest,
        "fill": num_tokens / (num_microbatches * tokens_per_round),
        "best_fill": num_tokens / (fewest * tokens_per_round),
        "ranks_max_over_mean": float(of_ranks.max() / of_ranks.mean()),
        "microbatches_max_over_mean": float((costs.max(axis=1) / costs.mean(axis=1)).max()),
    }


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 samples: does it run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else ROUNDS
    times = [measured(case, rounds) for case in (QUICK_TIMED if options.quick else TIMED)]
    fills = [filled(case) for case in (QUICK_FILLED if options.quick else FILLED)]
    show_times(times)
    show_fills(fills)
    more = {"max_tokens": CAP, "pad_multiple": PAD_MULTIPLE, "quadratic_over_linear": COST.quadratic / COST.linear}
    return written("packing", CPU, times, options.json, fills=fills, **more)


def show_times(times: Sequence[dict]) -> None:
    table = plain_table(f"one mini-batch (median of {times[0]['rounds']})", ("samples", "dp", "", "s"))
    for result in times:
        shape = "packed" if result["packed"] else "rectangles"
        table.add_row(str(result["num_samples"]), str(result["dp_size"]), shape, f"{result['seconds']:.3f}")
    Console(width=110).print(table)


def show_fills(fills: Sequence[dict]) -> None:
    columns = ("samples", "dp", "micro-batches", "fewest possible", "fill", "best possible", "ranks", "micro-batches")
    table = plain_table(f"fill of {CAP} tokens; per rank; at the right the highest cost over the mean", columns)
    for result in fills:
        table.add_row(
            *(str(result[name]) for name in ("num_samples", "dp_size", "num_microbatches", "fewest")),
            *(f"{result[name]:.1%}" for name in ("fill", "best_fill")),
            *(f"{result[f'{name}_max_over_mean']:.4f}" for name in ("ranks", "microbatches")),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
