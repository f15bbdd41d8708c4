"""Shared by the converters: opening the two kinds of folders, names of types, and the record of a
conversion."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from checkpoints_tools.command_line import progress
from megatron_dapo.checkpointing.folders import TRAINER_STATE, newest_first, read_trainer_state
from megatron_dapo.checkpointing.manifest import MANIFEST, Findings, read_manifest, verify
from megatron_dapo.checkpointing.model_card import model_card
from megatron_dapo.checkpointing.resume import verify_on_all_ranks
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import format_bytes
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.platform.agreement import describe
from megatron_dapo.storage.model_folder import HF, MEGATRON, ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics

if TYPE_CHECKING:
    import torch

    from checkpoints_tools.job import ConversionRanks
    from megatron_dapo.models.safetensors_files import SafetensorsFolder

CONVERSION = "conversion.json"
FORMAT_VERSION = 1
_DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
DTYPE_CHOICES = ("auto", *_DTYPE_NAMES)


def dtype_name(dtype: "torch.dtype") -> Literal["bfloat16", "float32"]:
    """Return the config's name of a type."""
    return cast(Literal["bfloat16", "float32"], str(dtype).removeprefix("torch."))


def torch_dtype(choice: str) -> "torch.dtype | None":
    """Return the type; none for auto."""
    import torch

    return getattr(torch, _DTYPE_NAMES[choice]) if choice in _DTYPE_NAMES else None


def source_dtype(folder: "SafetensorsFolder", names: list[str]) -> "torch.dtype":
    """Return the common type of the model's tensors, except those always in float32. Raises
    UserError for a type the trainer does not compute in."""
    import torch

    from megatron_dapo.models.weight_map import stored_dtype

    dtypes = {folder.tensor(name).dtype for name in names if stored_dtype(name, torch.bfloat16) == torch.bfloat16}
    if dtypes == {"BF16"}:
        return torch.bfloat16
    if dtypes == {"F32"}:
        return torch.float32
    raise UserError(
        f"--hf-model: the tensors of `{folder.path}` are {' and '.join(sorted(dtypes))}, a model here is BF16 or F32; "
        "give --dtype fp32, which changes no value, or --dtype bf16, which rounds."
    )


def read_spec(folder: str | Path, option: str, spec_of: Callable[[dict, str], ModelSpec] = model_spec) -> ModelSpec:
    """Return the model of a config.json. Raises UserError that names the option."""
    config = Path(folder) / "config.json"
    if not config.is_file():
        raise UserError(f"{option}: `{folder}` {_no_model(Path(folder))}")
    try:
        return spec_of(json.loads(config.read_text(encoding="utf-8")), str(config))
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{option}: `{config}` cannot be read ({error}); copy or download it again.") from error


def _no_model(folder: Path) -> str:
    """Return why there is no config.json, as the end of a sentence."""
    if not folder.is_dir():
        command = ModelFolder.of(folder).download() or "hf download NAME --local-dir DIR"
        return f"is not a folder here; correct the path, or download the model: {command}."
    if (folder / MEGATRON).is_dir():
        return "is a Megatron checkpoint; give the folder of a Hugging Face checkpoint."
    if inner := sorted(folder.glob("snapshots/*/config.json")):
        return f"is a cache of downloads; give a checkpoint in it, such as {inner[0].parent}."
    return "has no config.json; give the folder of a complete checkpoint."


def open_checkpoint(path: str | Path) -> Path:
    """Return a checkpoint folder, complete by its manifest and file sizes. Raises UserError."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"--checkpoint: `{path}` is not a folder; give one such as runs/NAME/checkpoints/step_000100.")
    if not (folder / MANIFEST).is_file():
        if inner := newest_first(folder) or newest_first(folder / "checkpoints"):
            raise UserError(f"--checkpoint: `{path}` holds checkpoints; give one of them, such as {inner[0]}.")
        if (folder / "config.json").is_file():
            raise UserError(
                f"--checkpoint: `{path}` is a Hugging Face checkpoint; give that of training or of a conversion."
            )
        if folder.resolve().name == MEGATRON:
            folder = folder.resolve().parent
    read_manifest(folder)
    _require_whole(folder, verify(folder, contents=False))
    for part in (MEGATRON, HF):
        if not (folder / part).is_dir():
            raise UserError(f"--checkpoint: `{path}` has no {part} folder; give a checkpoint that training wrote.")
    return folder


def require_contents(job: "ConversionRanks", folder: Path) -> None:
    """Compare every file with its checksum; the processes share the reading. Collective; raises
    UserError on all.

    Torch reads a tensor with a flipped bit without an error.
    """
    if job.is_main:
        print("comparing checksums ...", file=sys.stderr, flush=True)
    _require_whole(folder, verify_on_all_ranks(folder, job.agreement))


def _require_whole(folder: Path, findings: Findings) -> None:
    if not findings.is_whole:
        raise UserError(
            f"--checkpoint: `{folder}` is damaged: {'; '.join(findings.damage[:5])}; use another checkpoint."
        )


def stored_dtype(folder: Path) -> "torch.dtype":
    """Return the type of a checkpoint's weights, from its metadata. Raises UserError if it is
    damaged."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megatron_dapo.checkpointing.torch_dist.reading import INDEX, read_index

    entry = read_index(folder / MEGATRON).state_dict_metadata.get("embedding.word_embeddings.weight")
    if not isinstance(entry, TensorStorageMetadata):
        raise UserError(f"--checkpoint: `{folder / MEGATRON / INDEX}` lists no embedding; use another checkpoint.")
    return entry.properties.dtype


def read_conversion(folder: Path) -> dict | None:
    """Return the record that hf_to_megatron left; none in a checkpoint that training wrote. Raises
    UserError."""
    file = folder / CONVERSION
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        raise _damaged(file, error) from error


def card_of(folder: Path) -> str | None:
    """Return the model card of a training checkpoint; None of a converted model, which is its
    source. Raises UserError."""
    if not (folder / TRAINER_STATE).is_file():
        return None
    state, run = read_trainer_state(folder), RunFolder.holding(folder)
    records: list[dict] = []
    with suppress(OSError):  # a checkpoint may be copied without its run's metrics
        records = read_metrics(run.metrics) if run else []
    try:
        return model_card(state["config"], state["step"], records, read_manifest(folder).versions)
    except Exception as error:  # another program's
        raise _damaged(folder / TRAINER_STATE, error) from error


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"--checkpoint: `{file}` is damaged ({describe(error)}); use another checkpoint.")


def check_output(path: str | Path, num_bytes: int, option: str = "--output") -> None:
    """Check the output folder before anything large is read.

    Raise UserError if the folder exists already, cannot be made, or if its disk has no room for
    `num_bytes` bytes.
    """
    if Path(path).exists():
        raise UserError(f"{option}: `{path}` exists already; remove it, or give another folder.")
    parent = Path(os.path.abspath(path)).parent
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise UserError(f"{option}: `{path}` cannot be made, `{parent}` cannot be written; give another folder.")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise UserError(
            f"{option}: `{path}` needs {format_bytes(num_bytes)}, its disk has {format_bytes(free)} left; free some, "
            "or give another folder."
        )


@contextmanager
def percentage(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, and yield a function, to be called with (bytes done, bytes in all)."""
    with progress(what, 100, "%") as advance:
        shown = 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = 100 * done / max(total, 1)
            advance(now - shown)
            shown = now

        yield show
