"""A plan of time beside runs of the demo: it is told one run's measurements, and foretells others.

python -m benchmarks.bench_plan [--quick] [--runs FOLDER] [--json FILE]

Lengths and acceptance are inputs of a plan, so each run's own are given. The seconds of a step are
foretold by the run's own speeds (are the parts put together rightly?), and by the unchanged demo's.
Before that the demo's server answers batches of requests, for its time per token, per request and
for both. The plans of this run take these figures; at its end they are printed in the form of
`megatron_dapo/estimates/hardware.py`.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import server_seconds
from benchmarks.report import plain_table, written
from megatron_dapo.commands.plan.measured import MeasuredRun
from megatron_dapo.commands.plan.step_time import Assumptions, Factors, run_time
from megatron_dapo.commands.plan.training_time import Efficiency
from megatron_dapo.config.derived import replaces_groups
from megatron_dapo.estimates.hardware import Hardware, hardware_named
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.storage.run_folder import RunFolder

# The first one is the demo as it is. All of max_staleness 0: with more, trainer and server would
# share the two cores.
VARIANTS = {
    "the demo": [],
    "twice the groups": ["data.train_batch_size=32", "data.gen_batch_size=32"],
    "half the groups": ["data.train_batch_size=8", "data.gen_batch_size=8"],
    "twice the samples a group": ["actor_rollout_ref.rollout.n=16"],
    "32 requests at once": ["actor_rollout_ref.rollout.max_concurrency=32"],
}
STEPS, QUICK_STEPS = 20, 5
SERVER_ROUNDS = 9


def finished_run(name: str, runs: Path, num_steps: int) -> MeasuredRun:
    """Run a variant of the demo, unless its folder holds a finished run; return its figures."""
    folder = runs / name.replace(" ", "_")
    if not RunFolder(folder).model.exists():
        shorter = [f"trainer.run_dir={folder}", f"trainer.total_training_steps={num_steps}"]
        command = [sys.executable, "-m", "examples.arithmetic.demo", *VARIANTS[name], *shorter]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return MeasuredRun.of(folder)


def hardware_of(fit: Mapping[str, float]) -> Hardware:
    """Return the plan's CPU, with the measured own work of a server (`server_seconds.fitted`)."""
    return replace(
        hardware_named("cpu"),
        host_token_s=fit["token_s"],
        host_request_token_s=fit["request_token_s"],
        host_request_s=fit["request_s"],
    )


def factors(run: MeasuredRun, hardware: Hardware) -> Factors:
    """Return the factors of the run's slowness beside its estimate."""
    return run.factors(read_model_spec(run.config.actor_rollout_ref.model.path), hardware, Efficiency())


def foretold(run: MeasuredRun, hardware: Hardware, speeds: Factors) -> float:
    """Return the seconds of a step of the run's config by these speeds."""
    config = run.config
    acceptance = run.acceptance() if replaces_groups(config) else 1.0
    lengths = run.lengths(config.data.max_response_length)
    assumed = Assumptions(hardware, lengths, round(run.prompt()), acceptance, factors=speeds)
    return run_time(config, read_model_spec(config.actor_rollout_ref.model.path), assumed, [0]).steps[0].step


def measured(runs: Path, num_steps: int, hardware: Hardware) -> list[dict]:
    """Return a row per variant: seconds of a step, and both plans' shares of them."""
    finished = {name: finished_run(name, runs, num_steps) for name in VARIANTS}
    demo = factors(finished["the demo"], hardware)
    rows = []
    for name, run in finished.items():
        seconds = run.mean("time/step")
        own = foretold(run, hardware, factors(run, hardware))
        from_demo = foretold(run, hardware, demo)
        rows.append(
            {
                "run": name,
                "num_steps": len(run.records),
                "seconds_per_step": seconds,
                "foretold_by_itself": own,
                "foretold_by_the_demo": from_demo,
                "ratio_by_itself": own / seconds,
                "ratio_by_the_demo": from_demo / seconds,
            }
        )
    return rows


def table(rows: list[dict]):
    """Return one line per variant."""
    lines = plain_table("seconds of a step", ("run", "measured", "by its own speeds", "by the demo's speeds"))
    for row in rows:
        own, from_demo = (
            f"{row[f'foretold_{by}']:.2f} s ({row[f'ratio_{by}']:.2f})" for by in ("by_itself", "by_the_demo")
        )
        lines.add_row(row["run"], f"{row['seconds_per_step']:.2f} s", own, from_demo)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps each")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs; those that it has are not repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="plan-") as temporary:
        batches = server_seconds.measured(Path(temporary), 1 if options.quick else SERVER_ROUNDS)
        fit = server_seconds.fitted(batches)
        hardware = hardware_of(fit)
        rows = measured(options.runs or Path(temporary), QUICK_STEPS if options.quick else STEPS, hardware)
    Console(highlight=False, width=120).print(table(rows))
    print(f"\na server's own work, to {fit['largest_error']:.0%}, for megatron_dapo/estimates/hardware.py:")
    for name in ("host_token_s", "host_request_token_s", "host_request_s"):
        print(f"    {name}={getattr(hardware, name):.3g},")
    written("plan", torch.device("cpu"), rows, options.json, server={"batches": batches, "fit": fit})
    return 0


if __name__ == "__main__":
    sys.exit(main())
