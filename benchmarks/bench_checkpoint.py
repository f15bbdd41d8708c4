"""Saving a training checkpoint on one process: its throughput, and the standstill of training.

The checkpoint holds a model and the moments of Adam. The throughput stands beside torch.save of the
same bytes and a plain write of them, all flushed to the disk, in turns. The standstill under a save
in the background is a share of a blocking save's time.

A save here is the trainer's: tensors, checksums of all files (which read them again), manifest,
rename.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.measure import in_turns, ratio_of
from benchmarks.report import plain_table, written
from benchmarks.synthetic_model import ModelSize, write_model
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.run import TrainerConfig
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.platform.parallel import ParallelLayout

SIZES = {
    "quick": ModelSize(hidden=64, ffn=128, layers=2, vocab=256),
    "1.2 GB": ModelSize(hidden=1024, ffn=2816, layers=4, vocab=32768),
}
BUFFER = bytes(1 << 24)
POLL_S = 0.05


class Case:
    """A policy with its optimizer in memory, fp32, and a folder to write to."""

    def __init__(self, size: ModelSize, folder: Path) -> None:
        self.folder = folder
        write_model(folder / "hf", size, torch.float32, 10**9)
        self.layout = ParallelLayout.initialize()
        # Megatron: after `initialize` has prepared it
        from megatron_dapo.training.policy import Policy

        config = load_config(None, [f"actor_rollout_ref.model.path={folder / 'hf'}"])
        self.policy = Policy(config, self.layout)
        self.values = dict(self.policy.model.chunks[0].named_parameters())
        # weight, moments
        self.state = [torch.randn_like(value) for value in self.values.values() for _ in range(3)]
        self.num_bytes = sum(value.nbytes for value in self.state)

    def empty(self) -> Path:
        """Return an empty folder for one write; the last one's data are on no queue of the disk."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        os.sync()
        (self.folder / "out").mkdir()
        return self.folder / "out"


def raw_write(case: Case) -> dict[str, float]:
    path = case.empty() / "raw"

    def work() -> None:
        with path.open("wb") as file:
            for first in range(0, case.num_bytes, len(BUFFER)):
                file.write(BUFFER[: case.num_bytes - first])
            file.flush()
            os.fsync(file.fileno())

    return {"total": _seconds(work)}


def torch_save(case: Case) -> dict[str, float]:
    path = case.empty() / "state.pt"

    def work() -> None:
        with path.open("wb") as file:
            torch.save(case.state, file)
            file.flush()
            os.fsync(file.fileno())

    return {"total": _seconds(work)}


def blocking(case: Case) -> dict[str, float]:
    saver, final = _saver(case, background=False)
    tensors = _seconds(lambda: saver.start(final, {}, dict))
    return {"tensors": tensors, "total": tensors + _seconds(saver.finish)}


def background(case: Case) -> dict[str, float]:
    """Save in the background.

    The trainer looks in between the parts of a step; here a part is POLL_S of doing nothing.
    """
    saver, final = _saver(case, background=True)
    started = time.perf_counter()
    stalls = [_seconds(lambda: saver.start(final, {}, dict))]
    while not final.exists():
        time.sleep(POLL_S)
        stalls.append(_seconds(saver.poll))
    return {"stall": sum(stalls), "longest": max(stalls), "total": time.perf_counter() - started}


def _saver(case: Case, background: bool) -> tuple:
    from megatron_dapo.checkpointing.saver import Saver
    from megatron_dapo.checkpointing.torch_dist.saving import save

    state = case.policy.state

    def write_tensors(folder: Path):
        parts = {"optimizer": state.optimizer, "lr_schedule": state.lr_schedule}
        return [save(folder / "megatron", case.policy.model, case.layout, background=background, **parts)]

    return Saver(SingleRank(), write_tensors, TrainerConfig()), case.empty() / "step_000001"


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 0.4 MB: does it run?")
    parser.add_argument("--rounds", type=int, help="times each is measured, in turns (default: 3)")
    parser.add_argument("--folder", type=Path, help="where to write: the disk to measure (default: the system's place)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    name, rounds = ("quick", options.rounds or 1) if options.quick else ("1.2 GB", options.rounds or 3)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        case = Case(SIZES[name], Path(folder))
        try:
            ways = {"raw write": raw_write, "torch.save": torch_save, "blocking": blocking, "background": background}
            samples = in_turns({way: lambda f=f: f(case) for way, f in ways.items()}, rounds, warm_up=1)
        finally:
            case.layout.shutdown()
    result = summary(name, case.num_bytes, rounds, samples)
    show(result)
    return written("checkpoint", torch.device("cpu"), [result], options.json)


def summary(name: str, num_bytes: int, rounds: int, samples: dict[str, list[dict[str, float]]]) -> dict:
    """Return medians, and ratios within a round: a disk is not equally fast all the time."""
    medians = {
        way: {phase: statistics.median(sample[phase] for sample in taken) for phase in taken[0]}
        for way, taken in samples.items()
    }
    return {
        "state": name,
        "num_bytes": num_bytes,
        "rounds": rounds,
        "seconds": medians,
        "mb_per_s": {way: num_bytes / phases["total"] / 1e6 for way, phases in medians.items()},
        "tensors_over_torch_save": ratio_of(samples["blocking"], "tensors", samples["torch.save"], "total"),
        "total_over_torch_save": ratio_of(samples["blocking"], "total", samples["torch.save"], "total"),
        "total_over_raw_write": ratio_of(samples["blocking"], "total", samples["raw write"], "total"),
        "stall_over_blocking": ratio_of(samples["background"], "stall", samples["blocking"], "total"),
    }


def show(result: dict) -> None:
    title = f"checkpoint of {result['num_bytes'] / 1e9:.3g} GB (median of {result['rounds']})"
    columns = ("", "seconds", "MB/s", "of it tensors s", "training stands still s", "longest stop s")
    table = plain_table(title, columns)
    for way, phases in result["seconds"].items():
        cells = [f"{phases['total']:.2f}", f"{result['mb_per_s'][way]:.0f}"]
        cells += [f"{phases[phase]:.2f}" if phase in phases else "-" for phase in ("tensors", "stall", "longest")]
        table.add_row(way, *cells)
    Console(width=110).print(table)
    print(
        f"a save that is waited for takes {result['total_over_torch_save']:.2f} of torch.save's time (its tensors "
        f"{result['tensors_over_torch_save']:.2f}) and {result['total_over_raw_write']:.2f} of a raw write's;\n"
        f"in the background training stands still for {result['stall_over_blocking']:.1%} of it"
    )


if __name__ == "__main__":
    main()
