"""The common part of all benchmarks, from the command line to the report."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.measure import Seconds, in_turns, median_of, ratio_of
from benchmarks.provider import Provider, select
from benchmarks.report import Row, ShapeResult, show, written
from benchmarks.shapes import GPU_SHAPES, QUICK, SHAPES, Shape

LONG_ON_CPU = 1e11  # operations of one product
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse(
    description: str, providers: Sequence[Provider], arguments: Sequence[str] | None, cpu_shapes: Sequence[str]
) -> argparse.Namespace:
    """Return the options, with `device`, `dtype` and `shapes` resolved.

    cpu_shapes: a CPU's default.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="providers: " + ", ".join(p.name for p in providers) + "  |  shapes: " + ", ".join(SHAPES),
    )
    parser.add_argument("--quick", action="store_true", help="one tiny shape, nothing that compiles for long; seconds")
    parser.add_argument("--shapes", help="comma-separated (default: small ones on a CPU, three models' heads on a GPU)")
    parser.add_argument("--tokens", type=int, help="tokens per micro-batch, instead of each shape's own")
    parser.add_argument("--providers", help="comma-separated (default: all that can be imported)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--rounds", type=int, help="times each is measured, in turns (default: GPU 10, CPU 3 or 1)")
    parser.add_argument("--no-entropy", action="store_true", help="log-probs alone")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    options.device = torch.device(options.device)
    options.dtype = DTYPES[options.dtype or ("bfloat16" if options.device.type == "cuda" else "float32")]
    default = QUICK if options.quick else GPU_SHAPES if options.device.type == "cuda" else cpu_shapes
    names = options.shapes.split(",") if options.shapes else default
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"no shape {sorted(unknown)}; there are: {', '.join(SHAPES)}")
    options.shapes = [SHAPES[name].with_tokens(options.tokens) for name in names]
    return options


def _of_shape(options: argparse.Namespace, shape: Shape, chosen: dict, skipped: list[dict]) -> tuple:
    """Return (options, providers) for one shape, with `rounds` set.

    On a CPU a large one is measured once, unless --rounds says otherwise. It leaves out providers
    without the entropy, unless --providers names them.
    """
    long = options.device.type == "cpu" and shape.product_flops > LONG_ON_CPU
    default = 10 if options.device.type == "cuda" else 1 if long else 3
    if long and not options.providers and not options.no_entropy:
        without = [name for name, (provider, _) in chosen.items() if not provider.entropy]
        skipped += [{"provider": name, "reason": f"long at {shape.name}: name it in --providers"} for name in without]
        chosen = {name: value for name, value in chosen.items() if name not in without}
    return argparse.Namespace(**vars(options) | {"rounds": options.rounds or default}), chosen


def run(
    benchmark: str,
    options: argparse.Namespace,
    providers: Sequence[Provider],
    measure: Callable[[argparse.Namespace, Shape, dict], ShapeResult],
    unit: str = "ms",
) -> dict:
    """Measure every shape, print its table when it is done, and write and return the JSON."""
    chosen, skipped = select(providers, options.providers, options.device, options.quick)
    results = []
    for shape in options.shapes:
        of_shape, providers_here = _of_shape(options, shape, chosen, skipped)
        print(f"{benchmark}, {shape.name}: measuring {', '.join(providers_here)}", file=sys.stderr)
        results.append(measure(of_shape, shape, providers_here))
        show(benchmark, results[-1], unit)
    for left_out in skipped:
        print(f"not measured: {left_out['provider']} ({left_out['reason']})")
    return written(benchmark, options.device, [asdict(result) for result in results], options.json, skipped=skipped)


def attempt(provider: Provider, work: Callable[[], object]) -> str | None:
    """Run the work; return an error of a foreign implementation in a few words, None without one.

    Such an error is a result.
    """
    try:
        work()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except Exception as error:
        if provider.ours:
            raise
        print(f"{provider.name} failed: {error}", file=sys.stderr)
        return f"{type(error).__name__}"
    return None


def collect(
    shape: Shape,
    options: argparse.Namespace,
    rows: dict[str, Row],
    samplers: dict[str, Callable[[], Seconds]],
    yardstick: Callable[[], Seconds],
    relative_to: Sequence[str] = (),
) -> ShapeResult:
    """Time the samplers in turns with the yardstick; fill in the rows' times and ratios.

    Ratios are to other rows, too.
    """
    samples = in_turns({"yardstick": yardstick, **samplers}, options.rounds, warm_up=1 if options.quick else 0)
    yard = samples.pop("yardstick")
    for name, taken in samples.items():
        row = rows[name]
        row.forward_s, row.total_s = median_of(taken, "forward"), median_of(taken, "total")
        row.backward_s = median_of(taken, "backward") if "backward" in taken[0] else None
        row.ratios = {phase: ratio_of(taken, "total", yard, phase) for phase in yard[0]}
        others = [other for other in relative_to if other in samples]
        row.ratios |= {other: ratio_of(taken, "total", samples[other], "total") for other in others}
    yardsticks = {phase: median_of(yard, phase) for phase in yard[0]}
    dtype = str(options.dtype).removeprefix("torch.")
    return ShapeResult(asdict(shape), dtype, options.rounds, yardsticks, [*rows.values()])
