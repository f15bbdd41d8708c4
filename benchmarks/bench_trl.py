"""CPU seconds per sample of our trainer and of TRL's GRPOTrainer, one thread per process.

Model, prompts, samples per step, longest answers, loss and optimizer steps are the same. Ours
samples with an SGLang server, TRL with transformers' `generate` in the trainer's own process, both
all answers of a step at once. Both learn the arithmetic demo's sums; the larger model is made up.
Beside them stand the bare matrix products.

Beside its needs met by .venv, TRL goes into a folder of its own:

    .venv/bin/python -m pip install --no-deps --target DIR -r benchmarks/requirements_trl.txt
    .venv/bin/python benchmarks/bench_trl.py --trl DIR
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console

from benchmarks.cpu_watch import Reading, between, watched
from benchmarks.product_floor import Products, Step, floor
from benchmarks.report import plain_table, written
from benchmarks.synthetic_model import ModelSize, write_model
from examples.arithmetic.problems import BASE, write_files
from examples.cache import ROOT
from megatron_dapo.common.child_environment import ONE_THREAD
from megatron_dapo.telemetry.closing_table import read_metrics

CLIP_LOW, CLIP_HIGH, LR = 0.2, 0.28, 2e-4
NUM_LAST = 5  # steps in the mean of the last reward
SCHEDULER, HTTP, CONTROLLER = "server's scheduler", "server's HTTP", "controller"
SAMPLING, TRAINING, REST = "sampling", "training", "launcher"


@dataclass(frozen=True)
class Case:
    """A model and its run."""

    name: str
    model: ModelSize | None  # by default the demo's
    num_steps: int
    warm_up: int  # steps before the counted ones
    prompts_per_step: int
    max_response_length: int
    samples_per_prompt: int = 8
    mini_batches: int = 2

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


PRODUCTS = "products alone"
PROMPT_LENGTH = 6  # "45+38="
WHOLE = (SAMPLING, TRAINING, REST)
COLUMNS = (SAMPLING, TRAINING, "all")
LARGE = ModelSize(hidden=768, ffn=2048, layers=12, vocab=16384, heads=12)
CASES = (Case("demo, 0.6 M", None, 40, 2, 16, 40), Case("100 M", LARGE, 4, 1, 8, 24))
QUICK = (Case("demo, 0.6 M", None, 3, 1, 16, 40),)


def our_overrides(case: Case, model: Path, folder: Path) -> list[str]:
    """Return the demo's overrides for TRL's work on one rank.

    There is no filter, no punishment, no check of a push.
    """
    actor = "actor_rollout_ref.actor"
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={case.prompts_per_step}",
        f"data.gen_batch_size={case.prompts_per_step}",
        f"data.max_response_length={case.max_response_length}",
        f"actor_rollout_ref.rollout.n={case.samples_per_prompt}",
        f"{actor}.ppo_mini_batch_size={case.prompts_per_step // case.mini_batches}",
        f"{actor}.clip_ratio_low={CLIP_LOW}",
        f"{actor}.clip_ratio_high={CLIP_HIGH}",
        f"{actor}.optim.lr={LR}",
        f"{actor}.megatron.tensor_model_parallel_size=1",
        f"{actor}.megatron.sequence_parallel=false",
        "algorithm.dynamic_sampling.enable=false",
        "algorithm.overlong_reward_shaping.enable=false",
        "weight_sync.verify=false",
        "trainer.n_procs_per_node=1",
        f"trainer.total_training_steps={case.num_steps}",
        "trainer.logger=[console, jsonl]",
        f"trainer.run_dir={folder}",
    ]


def part_of_ours(command: Sequence[str], parent: str | None) -> str:
    """Return the part of a process in a run, by its command line; by default its parent's part."""
    line = " ".join(command)
    if "sglang::scheduler" in line:
        return SCHEDULER
    if "keyed_sglang" in line or "sglang::" in line:
        return HTTP
    # the controller is a child of rank 0, and has the reward workers
    if parent in (TRAINING, CONTROLLER):
        return CONTROLLER
    return TRAINING if "-m megatron_dapo train" in line else parent or REST


def ours(case: Case, model: Path, prompts: Path, folder: Path) -> tuple[Reading, list[dict]]:
    """Return the use by the steps after the warm-up, and the metrics of all steps."""

    def steps() -> list[dict]:
        file = folder / "metrics.jsonl"
        return [row for row in read_metrics(file) if "actor/loss" in row] if file.exists() else []

    command = [sys.executable, "-m", "examples.arithmetic.demo", *our_overrides(case, model, folder)]
    readings = watched(command, os.environ | ONE_THREAD, lambda: len(steps()), part_of_ours)
    used = between(readings, case.warm_up, case.num_steps)
    sampling = sum(used.cpu_s.get(part, 0.0) for part in (SCHEDULER, HTTP, CONTROLLER))
    return replace(used, cpu_s=used.cpu_s | {SAMPLING: sampling}), steps()


def trl(packages: Path, case: Case, model: Path, prompts: Path, folder: Path) -> tuple[Reading, list[dict]]:
    """Return the use by the steps after the warm-up, and the row of each step."""
    rows = folder / "rows.jsonl"
    folder.mkdir()

    def steps() -> list[dict]:
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []

    settings = asdict(case) | {"model": str(model), "prompts": str(prompts), "rows": str(rows)}
    settings |= {"lr": LR, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    for name in ("name", "warm_up"):
        del settings[name]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "benchmarks.trl_case", json.dumps(settings)]
    readings = watched(command, environment, lambda: len(steps()), lambda command, parent: TRAINING)
    used, done = between(readings, case.warm_up, case.num_steps), steps()
    sampling = done[case.num_steps - 1]["sampling_s"] - done[case.warm_up - 1]["sampling_s"]
    apart = {SAMPLING: sampling, TRAINING: used.cpu_s[TRAINING] - sampling}
    return Reading(used.num_steps, used.seconds, apart), done


def model_of(case: Case, folder: Path) -> Path:
    """Return the folder of the case's model: the demo's, or a made-up one with its tokenizer."""
    if case.model is None:
        return BASE
    write_model(folder, case.model, torch.float32, shard_bytes=2**30)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BASE / name, folder)
    return folder


def row_of(case: Case, name: str, used: Reading, steps: Sequence[dict]) -> dict:
    samples = used.num_steps * case.samples_per_step
    milliseconds = {part: 1e3 * seconds / samples for part, seconds in used.cpu_s.items()}
    return {
        "case": case.name,
        "trainer": name,
        "num_samples": samples,
        "cpu_ms_per_sample": milliseconds | {"all": sum(milliseconds.get(part, 0.0) for part in WHOLE)},
        "seconds": used.seconds,
        "last_reward": fmean(step["reward/mean"] for step in steps[-NUM_LAST:]),
    }


def floor_row(case: Case, model: Path, response_length: float) -> dict:
    """Return the cost of only a step's matrix products, with responses of this mean length."""
    tokens = (PROMPT_LENGTH + response_length) * case.samples_per_step / case.mini_batches
    step = Step(case.samples_per_step, PROMPT_LENGTH, response_length, round(tokens))
    milliseconds = {part: 1e3 * seconds for part, seconds in floor(Products.of_model(model), step).items()}
    training = milliseconds.pop("old log-probs") + milliseconds.pop("update")
    whole = {SAMPLING: milliseconds[SAMPLING], TRAINING: training, "all": milliseconds[SAMPLING] + training}
    return {"case": case.name, "trainer": PRODUCTS, "cpu_ms_per_sample": whole, "response_length": response_length}


def measured(case: Case, packages: Path | None) -> list[dict]:
    """Return a row per trainer, and one of the bare products.

    packages: the folder of TRL; without one only ours is measured.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as temporary:
        folder = Path(temporary)
        model = model_of(case, folder / "model")
        prompts, _ = write_files(folder)
        used, steps = ours(case, model, prompts, folder / "ours")
        rows = [row_of(case, "ours", used, steps)]
        if packages:
            rows.append(row_of(case, "TRL", *trl(packages, case, model, prompts, folder / "trl")))
            of_trl = rows[1]["cpu_ms_per_sample"]
            rows[0]["ratios"] = {part: rows[0]["cpu_ms_per_sample"][part] / of_trl[part] for part in COLUMNS}
        mean_length = fmean(step["response_length/mean"] for step in steps[case.warm_up :])
        return [*rows, floor_row(case, model, mean_length)]


def table(rows: Sequence[dict]):
    """Return a table with one row per trainer and model, and one of their ratios."""
    parts = (SCHEDULER, HTTP, CONTROLLER, *COLUMNS)
    names = ("CPU ms per sample", *parts, "seconds", "last reward")
    lines = plain_table("ours beside TRL's GRPOTrainer, one thread per process", names)
    for row in rows:
        used = row["cpu_ms_per_sample"]
        cells = [f"{used[part]:.2f}" if part in used else "-" for part in parts]
        cells += [
            f"{row[name]:.{digits}f}" if name in row else "-" for name, digits in (("seconds", 1), ("last_reward", 3))
        ]
        lines.add_row(f"{row['case']}: {row['trainer']}", *cells)
    for row in rows:
        if "ratios" in row:
            ratios = [f"{row['ratios'][part]:.2f}" for part in COLUMNS]
            lines.add_row(f"{row['case']}: ours / TRL", "", "", "", *ratios, "", "")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three steps of the demo; half a minute")
    parser.add_argument("--trl", type=Path, metavar="DIR", help="the folder that TRL is in")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(arguments)
    rows = [row for case in (QUICK if options.quick else CASES) for row in measured(case, options.trl)]
    Console(highlight=False, width=150).print(table(rows))
    if not options.trl:
        print("not measured: TRL (--trl is not given; the head of this file says how to get it)")
    packages = {name: metadata.version(name) for name in ("transformers", "sglang")}
    if options.trl:
        packages |= {
            package.name: package.version for package in metadata.distributions(name="trl", path=[str(options.trl)])
        }
    written("trl", torch.device("cpu"), rows, options.json, packages=packages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
