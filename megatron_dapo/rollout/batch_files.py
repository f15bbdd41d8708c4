"""Finished batches as files: written by `trainer.dump_batches`, read by a replay."""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import whole_file
from megatron_dapo.data.routed_experts import as_text
from megatron_dapo.data.samples import Group, RolloutBatch
from megatron_dapo.queue.plain_data import group_from_plain, group_to_plain
from megatron_dapo.storage.run_folder import batch_file, batch_steps

FORMAT_VERSION = 1
_FAST = 1  # zlib level: log-probs hardly shrink at any


def write_batch(folder: str | Path, step: int, batch: RolloutBatch) -> None:
    """Write a finished batch whole, one group per line. Equal batches give equal files."""
    head = {"format": FORMAT_VERSION, "step": step, "metrics": batch.metrics}
    with whole_file(batch_file(folder, step)) as file, gzip.GzipFile("", "wb", _FAST, file, mtime=0) as packed:
        packed.write(f'{json.dumps(head)[:-1]}, "groups": ['.encode())
        for number, group in enumerate(batch.groups):
            packed.write(f"{',' if number else ''}\n{json.dumps(_plain(group), default=_for_json)}".encode())
        packed.write(b"\n]}\n")


def read_batch(folder: str | Path, step: int) -> RolloutBatch:
    """Return the batch of `write_batch`, number for number. Raises UserError naming the file."""
    path = batch_file(folder, step)
    if not path.is_file():
        raise UserError(f"There is no batch {path} to replay; {folder} has {_in_words(batch_steps(folder))}.")
    try:
        with gzip.open(path, "rb") as file:
            plain = json.load(file)
        if (plain["format"], plain["step"]) != (FORMAT_VERSION, step):
            raise ValueError(f"it is of step {plain['step']} in format {plain['format']}, not {FORMAT_VERSION}")
        return RolloutBatch(groups=tuple(map(group_from_plain, plain["groups"])), metrics=plain["metrics"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"Batch {path} cannot be read ({reason}); dump it again, or replay other batches.") from error


def _plain(group: Group) -> dict:
    """Return a group as plain data, with routed experts as text.

    As lists they would take hundreds of times longer than everything else.
    """
    plain = group_to_plain(group)
    for sample in plain["samples"]:
        for branch in (sample, *sample.get("others", ())):
            if "routed_experts" in branch:
                branch["routed_experts"] = as_text(branch["routed_experts"])
    return plain


def _for_json(value: object) -> list | str:
    """Return an array as a list, and other values as text.

    An extra_info from parquet may hold dates; only reward functions read it.
    """
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _in_words(steps: list[int]) -> str:
    if not steps:
        return "none"
    num_gaps = steps[-1] - steps[0] + 1 - len(steps)
    return f"those of steps {steps[0]} to {steps[-1]}" + (f" but for {num_gaps}" if num_gaps else "")
