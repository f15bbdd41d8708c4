"""Times comparable on a machine of changing speed: taken in turns, as ratios to plain products.

The yardstick of a head is the bare cost of its matrix products. It is taken in the same process, at
the same shape, between the same two runs of everything else.

- G1: logits.
- G3: logits, gradient of hidden, gradient of weight: the least of a training pass.
- G4: the same with logits computed twice.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Seconds = dict[str, float]  # phase -> seconds


def clock(device: torch.device) -> str:
    """Return the name of the clock of `timed`.

    A single thread is timed by its processor time: others on the machine, who make it wait, do not
    count. Of several threads that would be the sum.
    """
    if device.type == "cuda":
        return "cuda events"
    return "processor" if torch.get_num_threads() == 1 else "wall"


def timed(device: torch.device, work: Callable[[], object]) -> tuple[object, float]:
    """Return (result, seconds) by the `clock` of the device."""
    if device.type != "cuda":
        now = time.process_time if clock(device) == "processor" else time.perf_counter
        start = now()
        result = work()
        return result, now() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = work()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end) / 1e3


def in_turns(samplers: Mapping[str, Callable[[], Seconds]], rounds: int, warm_up: int) -> dict[str, list[Seconds]]:
    """Return the samples of every sampler, one per round, after `warm_up` uncounted rounds."""
    samples: dict[str, list[Seconds]] = {name: [] for name in samplers}
    for number in range(warm_up + rounds):
        for name, sampler in samplers.items():
            taken = sampler()
            if number >= warm_up:
                samples[name].append(taken)
    return samples


def median_of(samples: list[Seconds], phase: str) -> float:
    return statistics.median(sample[phase] for sample in samples)


def ratio_of(samples: list[Seconds], phase: str, yardstick: list[Seconds], yard_phase: str) -> float:
    """Return the median over rounds of the ratio within a round: a slower machine slows both."""
    pairs = zip(samples, yardstick, strict=True)
    return statistics.median(sample[phase] / yard[yard_phase] for sample, yard in pairs)


def plain_products(hidden_TH: Tensor, weight_VH: Tensor) -> Callable[[], Seconds]:
    """Return a sampler of G1, G3 and G4. It holds one [T, V] buffer while it runs."""
    device = hidden_TH.device
    hidden, weight = hidden_TH.detach(), weight_VH.detach()

    def sample() -> Seconds:
        # touched before: page faults are not the products' time
        logits = hidden.new_zeros(hidden.size(0), weight.size(0)).add_(0.0)
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        _, forward = timed(device, lambda: torch.mm(hidden, weight.t(), out=logits))
        _, to_hidden = timed(device, lambda: torch.mm(logits, weight, out=grad_hidden))
        _, to_weight = timed(device, lambda: torch.mm(logits.t(), hidden, out=grad_weight))
        return {"G1": forward, "G3": forward + to_hidden + to_weight, "G4": 2 * forward + to_hidden + to_weight}

    return sample
