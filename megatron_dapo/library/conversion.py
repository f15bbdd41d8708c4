"""Converts models from Python, each in a process of its own: the caller may hold GPUs and process
groups, and a conversion needs neither."""

import os
import re
import subprocess
import sys
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE

_SHOWN_CHARS = 2000
# of a caller that torchrun, srun or mpirun started: a conversion would wait for the caller's other ranks
_OF_RANKS = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|(OMPI_COMM_WORLD|PMI)_SIZE|SLURM_STEP_NUM_TASKS")


def convert_to_megatron(hf_model: str | Path, output: str | Path, *, dtype: str = "auto") -> Path:
    """Write a Megatron checkpoint that any layout can load, and return its folder.

    Args:
        hf_model: a Hugging Face checkpoint (safetensors).
        output: the folder to make.
        dtype: of the weights: "bf16", "fp32", or "auto" for that of hf_model.

    Raises:
        UserError: for mistakes and disks that fail; then there is no output.
        RuntimeError: for any other failure.
    """
    return _convert("to-megatron", output, f"--hf-model={os.fspath(hf_model)}", f"--dtype={dtype}")


def convert_to_huggingface(checkpoint: str | Path, output: str | Path, *, dtype: str = "auto") -> Path:
    """Write a Hugging Face checkpoint (safetensors), and return its folder. Raises like
    `convert_to_megatron`.

    Args:
        checkpoint: of training (RUN/checkpoints/step_N), or of `convert_to_megatron`.
        output: the folder to make.
        dtype: of the weights: "bf16", "fp32", or "auto" for the stored one.
    """
    return _convert("to-hf", output, f"--checkpoint={os.fspath(checkpoint)}", f"--dtype={dtype}")


def _convert(form: str, output: str | Path, *options: str) -> Path:
    environment = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    command = [sys.executable, "-m", "megatron_dapo", "convert", form, f"--output={os.fspath(output)}", *options]
    ended = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", errors="replace")
    if ended.returncode == USER_ERROR_EXIT_CODE:
        _, head, sentences = ended.stderr.rpartition(" to correct:\n")
        # argparse's own mistakes end in a sentence
        lines = sentences.splitlines() if head else ended.stderr.splitlines()[-1:]
        raise UserError(lines or f"convert {form} refused its arguments.")
    if ended.returncode:
        raise RuntimeError(f"convert {form} failed with exit code {ended.returncode}: {ended.stderr[-_SHOWN_CHARS:]}")
    return Path(output)
