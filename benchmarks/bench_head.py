"""The head: from hidden states and a weight to the DAPO loss and its gradients.

Time over plain matrix products, peak memory above inputs and gradient buffers, error against
float64.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.command_line import attempt, collect, parse, run
from benchmarks.head_case import HeadCase, errors, exact, make_case
from benchmarks.head_providers import PROVIDERS
from benchmarks.measure import Seconds, plain_products, timed
from benchmarks.memory import peak_bytes
from benchmarks.provider import Provider
from benchmarks.report import Row, ShapeResult
from benchmarks.shapes import Shape

TOKENS_FOR_ERRORS = 256  # the float64 answer holds several [T, V] tensors


def one_pass(provider: Provider, head, case: HeadCase):
    """Return the answer of a forward pass, and of the backward pass if any, up to main_grad."""
    answer = head(case)
    if provider.backward:
        answer.loss.backward()
        case.collect_weight_gradient()
    return answer


def seconds(provider: Provider, head, case: HeadCase) -> Seconds:
    case.clear_gradients()
    answer, forward = timed(case.device, lambda: head(case))
    if not provider.backward:
        return {"forward": forward, "total": forward}

    def finish() -> None:
        answer.loss.backward()
        case.collect_weight_gradient()

    _, backward = timed(case.device, finish)
    return {"forward": forward, "backward": backward, "total": forward + backward}


def measure(options: argparse.Namespace, shape: Shape, chosen: dict) -> ShapeResult:
    with_entropy = not options.no_entropy
    small = replace(shape, num_tokens=min(shape.num_tokens, TOKENS_FOR_ERRORS))
    rows = {}
    small_case = make_case(small, options.device, options.dtype, with_entropy=with_entropy)
    references = {flag: exact(case) for flag, case in _both(small_case).items()}
    for name, (provider, head) in chosen.items():
        flag = provider.entropy and with_entropy
        rows[name] = Row(name, entropy=flag)
        _measure_errors(rows[name], provider, head, _both(small_case)[flag], references[flag])
    del small_case, references

    cases = _both(make_case(shape, options.device, options.dtype, with_entropy=with_entropy))
    for name, (provider, head) in chosen.items():
        _measure_memory(rows[name], provider, head, cases[rows[name].entropy])
    samplers = {
        name: lambda p=provider, h=head, c=cases[rows[name].entropy]: seconds(p, h, c)
        for name, (provider, head) in chosen.items()
        if rows[name].failure is None
    }
    yardstick = plain_products(cases[False].hidden_TH, cases[False].weight_VH)
    return collect(shape, options, rows, samplers, yardstick, relative_to=("naive",))


def _both(case: HeadCase) -> dict[bool, HeadCase]:
    """Return the case by its flag for the entropy."""
    return {case.with_entropy: case, False: case.without_entropy()}


def _measure_errors(row: Row, provider: Provider, head, case: HeadCase, reference) -> None:
    def work() -> None:
        case.clear_gradients()
        row.errors = errors(case, one_pass(provider, head, case), reference)

    row.failure = attempt(provider, work)


def _measure_memory(row: Row, provider: Provider, head, case: HeadCase) -> None:
    def work() -> None:
        case.clear_gradients()
        # compiled code for this shape, libraries' own buffers
        if provider.slow_start or case.device.type == "cuda":
            one_pass(provider, head, case)
            case.clear_gradients()
        row.peak_bytes = peak_bytes(lambda: one_pass(provider, head, case), case.device)

    row.failure = row.failure or attempt(provider, work)


def main(arguments: Sequence[str] | None = None) -> dict:
    options = parse(__doc__, PROVIDERS, arguments, cpu_shapes=("cpu-1k", "cpu-8k"))
    return run("head", options, PROVIDERS, measure)


if __name__ == "__main__":
    main()
