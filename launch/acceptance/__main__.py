"""python -m launch.acceptance: climb the ladder of checks of a new machine, and stop at the first
red rung.

python -m launch.acceptance [--list] [--output DIR] [--config FILE [key=value ...]]
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from launch.acceptance.ladder import LADDER, MODEL
from launch.acceptance.report import GREEN, NOT_REACHED, RED, SKIPPED, RungResult, summary, write_report
from launch.acceptance.rung import Attempt, Inputs, Red, Rung
from launch.acceptance.sizes import MIN_GPU_BANDWIDTH, SYNTHETIC, measured, sizes_of
from launch.command_line import STOP_SIGNALS, checked_config, parse, parser, require_one_node
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.child_environment import COMMON
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.signals import StopSignals
from megatron_dapo.common.standard_streams import print_line


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code.

    - 0: every rung from the first one, or from --start, is green or skipped.
    - 1: one is red.
    - 2: mistakes of the user.
    - 128 + signal: a request to stop.
    """
    os.environ.update(COMMON)
    arguments, overrides = parse(_parser(), argv)
    if arguments.list:
        for rung in LADDER:
            print_line(f"{rung.name:<11}  at most {rung.limit_s:>4.0f} s  {rung.question}")
        return 0
    try:
        inputs = _inputs(arguments, overrides)
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        return 130
    with StopSignals(STOP_SIGNALS) as stop:
        results = climb(LADDER, inputs, arguments.start, stop)
    print_line(f"{summary(results)}\nreport: {inputs.folder / 'report.md'}")
    if not any(result.state == RED for result in results):
        return 0
    return stop.exit_code if stop.received else FAILED_EXIT_CODE


def _parser() -> argparse.ArgumentParser:
    options_parser = parser(
        "launch.acceptance",
        "Check a new machine, rung by rung, and stop at the first red one (docs/acceptance.md).",
    )
    options_parser.add_argument("--list", action="store_true", help="show the rungs and their limits, and stop")
    options_parser.add_argument(
        "--start",
        choices=[rung.name for rung in LADDER],
        metavar="RUNG",
        help="begin there; the verdict is of the rest",
    )
    options_parser.add_argument(
        "--output", type=Path, default=Path("runs/acceptance"), metavar="DIR", help="a new folder (runs/acceptance)"
    )
    options_parser.add_argument(
        "--min-bandwidth",
        type=float,
        metavar="GB/S",
        help=f"floor of the all-reduce; else {MIN_GPU_BANDWIDTH:g} on GPUs",
    )
    return options_parser


def _inputs(arguments: argparse.Namespace, overrides: list[str]) -> Inputs:
    """Raises UserError with every mistake."""
    if not MODEL.is_dir():
        raise UserError(
            "The rungs train the model of examples/arithmetic, and run benchmarks and tests, which the installed "
            "package does not have; clone the repository, and run make setup there (docs/install.md)."
        )
    recipe: tuple[str, ...] = ()
    if arguments.config:
        small = [*overrides, *measured(checked_config(arguments.config, [*overrides, SYNTHETIC]))]
        require_one_node(checked_config(arguments.config, small))
        recipe = ("--config", arguments.config, *small)
    elif overrides:
        raise UserError(f"{overrides[0]} sets a key of the recipe to measure; name that with --config FILE.")
    folder = arguments.output.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--output {arguments.output} is not empty; give a new folder, or move this one away.")
    sizes = sizes_of(_num_gpus())
    folder.mkdir(parents=True, exist_ok=True)
    return Inputs(sizes, folder, recipe, arguments.min_bandwidth)


def _num_gpus() -> int:
    """Raise UserError if torch knows no GPUs, but the machine has some that are not hidden on
    purpose. Otherwise a machine of GPUs would be accepted for its CPU."""
    import torch

    from launch.preflight.gpus import are_expected

    are_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None and nvidia_driver.is_loaded() and not are_hidden:
        raise UserError(
            f"This machine has an NVIDIA driver, but torch {torch.__version__} is built for CPUs only; run make setup "
            "PLATFORM=cuda in this folder, or set CUDA_VISIBLE_DEVICES= to climb on the CPU."
        )
    if not are_expected():
        return 0
    from megatron_dapo.servers.server_command import visible_gpus

    return len(visible_gpus())


def climb(
    ladder: Sequence[Rung], inputs: Inputs, start: str | None = None, stop: StopSignals | None = None
) -> list[RungResult]:
    """Climb rung by rung, up to the first red one; return a result for every rung.

    Each result is shown and reported at once. start: name of the first rung to climb. stop: a
    signal makes the current rung red.
    """
    first = next((place for place, rung in enumerate(ladder) if rung.name == start), 0)
    results = [_without(rung, NOT_REACHED, f"--start {start}") for rung in ladder[:first]]
    for result in _results(ladder[first:], inputs, stop):
        results.append(result)
        rest = [_without(rung, NOT_REACHED, "") for rung in ladder[len(results) :]]
        write_report(inputs.folder, [*results, *rest], asdict(inputs.sizes))
        print_line(result.line())
    return [*results, *(_without(rung, NOT_REACHED, "") for rung in ladder[len(results) :])]


def _results(ladder: Sequence[Rung], inputs: Inputs, stop: StopSignals | None) -> Iterator[RungResult]:
    for rung in ladder:
        if why := rung.needs(inputs):
            yield _without(rung, SKIPPED, why)
            continue
        result = _climbed(rung, inputs, stop)
        yield result
        if result.state == RED:
            return


def _climbed(rung: Rung, inputs: Inputs, stop: StopSignals | None) -> RungResult:
    start = time.monotonic()
    attempt = Attempt(rung, inputs, stop)
    try:
        verdict = rung.climb(attempt)
        state, text, numbers = GREEN, verdict.text, verdict.numbers
    except Red as red:
        state, text, numbers = RED, f"{red}; its log is {attempt.log}", {}
    except Exception as error:  # of any kind: the report must name the rung
        state, numbers = RED, {}
        text = f"it could not be judged ({type(error).__name__}: {error}); its log is {attempt.log}"
        with suppress(OSError):  # a full disk, which may be the error
            attempt.note(traceback.format_exc())
    seconds = time.monotonic() - start
    return RungResult(
        rung.name, rung.question, state, text, seconds, rung.limit_s, str(attempt.log), attempt.commands, numbers
    )


def _without(rung: Rung, state: str, text: str) -> RungResult:
    return RungResult(rung.name, rung.question, state, text, 0.0, rung.limit_s)


if __name__ == "__main__":
    sys.exit(main())
