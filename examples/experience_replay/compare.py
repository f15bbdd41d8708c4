"""Both arms, replay on and off, with the real trainer and one real server: how soon does rare success become common?

python -m examples.experience_replay.compare [--seeds 1 2 3] [--results FILE] [--plot FILE] [key=value ...]

About a minute per run on two CPU cores. The arms differ in exp_manager.experience_replay.enable alone.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from examples.arithmetic.problems import split
from examples.cache import ROOT, cache_folder
from examples.character_model import is_made
from examples.demo_run import config_path, prompt_files
from examples.experience_replay import guesser
from examples.experience_replay.plot import draw
from examples.prompts import write_prompt_files
from launch.command_line import checked_config
from launch.local import run_local
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics

REPLAY = "exp_manager.experience_replay"
ARMS = {
    "without replay": [f"{REPLAY}.enable=false"],
    "with replay": [],
}
RESULTS = ROOT / "benchmarks" / "results" / "experience_replay_cpu.json"
PLOT = ROOT / "docs" / "experience_replay.svg"
GOAL = 0.5
# for training, again and again, and for validation: the rare event is a right answer at all
SUMS = split()[0][:32]


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    made.add_argument("--results", type=Path, default=RESULTS, help="JSON file for the curves")
    made.add_argument("--plot", type=Path, default=PLOT, help="SVG file")
    made.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = made.parse_intermixed_args(argv)
    try:
        results = compare(arguments.seeds, arguments.overrides)
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return 2
    write_whole(arguments.results, json.dumps(results, indent=1) + "\n")
    write_whole(arguments.plot, draw(results))
    print(table(results))
    return 0


def compare(seeds: list[int], overrides: list[str]) -> dict:
    """Return the curves of every arm and seed."""
    folder = cache_folder() / "experience_replay"
    base = folder / "base"
    if not is_made(base, guesser.SETTINGS):
        print("making the base model, about a minute ...", flush=True)
        guesser.make(base)
    named = [
        *prompt_files(*write_prompt_files(folder, "arithmetic", (SUMS, SUMS))),
        f"actor_rollout_ref.model.path={base}",
        "trainer.test_freq=10",
    ]
    named += overrides
    config = config_of(named)
    curves: dict[str, dict[str, list]] = {arm: {} for arm in ARMS}
    # each run begins with sending it its own first weights
    with one_server(config, folder / "server") as urls:
        for seed in seeds:
            for arm, changes in ARMS.items():
                run = RunFolder(folder / "runs" / f"{arm.partition(' ')[0]}_{seed}")
                seeded = [f"trainer.run_dir={run.path}", f"trainer.seed={seed}", f"data.seed={seed}"]
                # not from a broken-off comparison's checkpoints
                seeded.append("trainer.resume=never")
                print(f"{arm}, seed {seed}: {run.path}", flush=True)
                curves[arm][str(seed)] = success(run, config_of([*named, *urls, *seeded, *changes]))
    return {"goal": GOAL, "settings": settings(config, overrides), "curves": curves}


def config_of(overrides: list[str]) -> Config:
    return checked_config(str(config_path("experience_replay.yaml")), overrides)


@contextmanager
def one_server(config: Config, logs: Path) -> Iterator[list[str]]:
    """Run one server and yield the overrides naming it."""
    logs.mkdir(parents=True, exist_ok=True)
    supervisor = ServerSupervisor(config, logs)
    try:
        supervisor.start()
        supervisor.wait_healthy()
        yield supervisor.overrides()
    finally:
        supervisor.stop()


def success(run: RunFolder, config: Config) -> list[tuple[int, float]]:
    """Train and return (rollout steps done, share of right answers to the sums, sampled as in
    training)."""
    run.metrics.unlink(missing_ok=True)
    if run_local(config):
        raise UserError(f"The run in {run.path} failed; its logs are in {run.logs}.")
    return [(line["step"], line["val/accuracy"]) for line in read_metrics(run.metrics) if "val/accuracy" in line]


def settings(config: Config, overrides: list[str]) -> dict:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    return {
        "prompts per step": data.train_batch_size,
        "responses per prompt": rollout.n,
        "steps": config.trainer.total_training_steps,
        "overrides": overrides,
        "date": datetime.date.today().isoformat(),
        "versions": {package: version(package) for package in ("torch", "megatron-core", "sglang")},
    }


def first_passed(curve: list[tuple[int, float]], goal: float = GOAL) -> int | None:
    """Return the first step with a success above the goal after it; None without one."""
    return next((step for step, share in curve if share > goal), None)


def table(results: dict) -> str:
    seeds = "".join(f"{f'seed {seed}':>9}" for seed in results["curves"]["with replay"])
    lines = [f"{'steps until success passes 50 %':<34}{seeds}"]
    for arm, runs in results["curves"].items():
        lines.append(f"{arm:<34}" + "".join(f"{first_passed(curve) or '-':>9}" for curve in runs.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
