"""Verifies a Megatron checkpoint against the Hugging Face checkpoint of the same model.

    python -m checkpoints_tools.verify_checkpoint --checkpoint DIR --hf-model DIR

It compares checksums of all files, every tensor to the bit, and log-probs of real text beside
transformers'. With --round-trip it converts back, and compares the files byte for byte.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_tools.command_line import at_least
from checkpoints_tools.converted import open_checkpoint, percentage, read_spec, require_contents, stored_dtype
from checkpoints_tools.job import ConversionRanks, run
from checkpoints_tools.megatron_to_hf import file_plan, load_model
from checkpoints_tools.sample_text import SAMPLE_TEXT
from megatron_dapo.checkpointing.manifest import read_manifest
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE
from megatron_dapo.common.sizes import format_bytes
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.storage.model_folder import HF, MEGATRON
from megatron_dapo.storage.staged_folder import StagedFolder

if TYPE_CHECKING:
    import torch

    from megatron_dapo.models.build import ModelParts
    from megatron_dapo.models.safetensors_files import SafetensorsFolder
    from megatron_dapo.platform.parallel import ParallelLayout

_SEQUENCE_TOKENS = 512


@dataclass(frozen=True)
class Comparison:
    """One line of the report."""

    what: str
    text: str
    good: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0 if both are the same model, 1 if they differ, 2 for mistakes of
    the user."""
    arguments = parser().parse_args(argv)
    return run(lambda job: verify(job, arguments))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.verify_checkpoint",
        description="Verify a Megatron checkpoint against a Hugging Face checkpoint: tensors, log-probs, files.",
        epilog="One process, or several of torchrun, srun or mpirun: --tp, --pp. Exit code 1: they differ.",
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="the Megatron checkpoint")
    parser.add_argument("--hf-model", required=True, metavar="DIR", help="the Hugging Face checkpoint")
    parser.add_argument("--text", metavar="FILE", help="text for the log-probs (default: some that comes with this)")
    parser.add_argument(
        "--num-tokens", type=at_least(0), default=1024, metavar="N", help="of it; 0: no log-probs (1024)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="largest difference of a log-prob in float32 (1e-3)"
    )
    parser.add_argument("--round-trip", action="store_true", help="convert back beside it, compare files, remove them")
    parser.add_argument("--tp", type=at_least(1), metavar="N", help="how the processes cut the model: tensor parallel")
    parser.add_argument("--pp", type=at_least(1), metavar="N", help="... pipeline parallel (default: all of them)")
    return parser


def verify(job: ConversionRanks, arguments: argparse.Namespace) -> int:
    """Print a report, line by line, and return the exit code. Collective; raises UserError on every
    process."""
    good = True
    for finding in _findings(job, arguments):
        good = good and finding.good
        if job.is_main:
            print_line(f"{finding.what:<11} {'ok     ' if finding.good else 'DIFFERS'} {finding.text}")
    return 0 if good else FAILED_EXIT_CODE


def _findings(job: ConversionRanks, arguments: argparse.Namespace) -> Iterator[Comparison]:
    import torch

    from megatron_dapo.models.hf_io import check_hf_weights
    from megatron_dapo.models.safetensors_files import SafetensorsFolder

    def opened():
        folder = open_checkpoint(arguments.checkpoint)
        spec = read_spec(folder / HF, "--checkpoint")
        if read_spec(arguments.hf_model, "--hf-model") != spec:
            raise UserError(f"--hf-model: the config.json of `{arguments.hf_model}` describes another model.")
        source = SafetensorsFolder(arguments.hf_model, "--hf-model")
        check_hf_weights(source, spec)
        return folder, spec, source

    folder, spec, source = job.on_all_ranks(opened)
    require_contents(job, folder)
    manifest = read_manifest(folder)
    yield Comparison(
        "files", f"{len(manifest.files)} files, {format_bytes(manifest.num_bytes)}, checksums as written", True
    )

    sequences = job.on_main_rank(lambda: _token_sequences(arguments, spec.vocab_size))
    expected = _reference_log_probs(arguments.hf_model, sequences) if sequences else None
    with job.layout(spec, arguments.tp, arguments.pp) as layout:
        # float32 holds every bf16 value, and shows a wrong weight that rounding would hide
        model = load_model(job, folder / MEGATRON, spec, torch.float32, layout)
        yield _compare_tensors(job, model, layout, source, stored_dtype(folder))
        if arguments.num_tokens:
            yield _compare_log_probs(job, model, layout, sequences, expected, arguments.tolerance)
        if arguments.round_trip:
            yield _round_trip(job, model, layout, folder, spec, source)


def _compare_tensors(
    job: ConversionRanks,
    model: "ModelParts",
    layout: "ParallelLayout",
    source: "SafetensorsFolder",
    dtype: "torch.dtype",
) -> Comparison:
    """Compare every tensor of the model, gathered, in the type that it is stored in, beside that of
    the file."""
    import torch.distributed as dist

    from megatron_dapo.models.weight_source import WeightSource

    weights = WeightSource(model, layout)
    specs = weights.specs()
    different = []
    largest = 0.0
    with percentage("comparing") as done:
        for number, spec in enumerate(specs, start=1):
            tensors = weights.gather([spec])
            if tensors is not None:
                stored = _read(source, spec.name).to(dtype)
                ours = tensors[0].to(dtype)
                if not _same_bits(ours, stored):
                    different.append(spec.name)
                    largest = max(largest, (ours.float() - stored.float()).abs().max().item())
            done(number, len(specs))
    result = (len(specs), different, largest) if layout.is_source else (0, [], 0.0)
    gathered: list = [None] * job.world_size
    dist.all_gather_object(gathered, result)
    num = sum(part[0] for part in gathered)
    names = [name for part in gathered for name in part[1]]
    if not names:
        return Comparison("tensors", f"{num} of {num} equal to the bit ({str(dtype).removeprefix('torch.')})", True)
    worst = max(part[2] for part in gathered)
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return Comparison("tensors", f"{len(names)} of {num} differ, by up to {worst:.2e}: {shown}", False)


def _read(source: "SafetensorsFolder", name: str) -> "torch.Tensor":
    """Return a whole tensor of a file. Raises UserError."""
    try:
        return source.read(name, dim=None)
    except OSError as error:
        raise UserError(f"--hf-model: `{source.path}` cannot be read ({error}).") from error


def _same_bits(a: "torch.Tensor", b: "torch.Tensor") -> bool:
    import torch

    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _token_sequences(arguments: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Return the first tokens of the text, in sequences of at most 512. Raises UserError."""
    if not arguments.num_tokens:
        return []
    from transformers import AutoTokenizer

    try:
        text = Path(arguments.text).read_text(encoding="utf-8") if arguments.text else SAMPLE_TEXT
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text: `{arguments.text}` cannot be read ({error}).") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.hf_model, trust_remote_code=False)
    except Exception as error:  # a damaged file makes the library raise anything
        raise UserError(f"--hf-model: `{arguments.hf_model}` has no usable tokenizer; give --num-tokens 0.") from error
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"][: arguments.num_tokens]
    if len(tokens) < 2:
        raise UserError(
            f"--num-tokens {arguments.num_tokens}: the text gives {len(tokens)}; log-probs need two or more."
        )
    if max(tokens) >= vocab_size:
        raise UserError(f"--hf-model: the tokenizer of `{arguments.hf_model}` does not fit the model's vocabulary.")
    num = math.ceil(len(tokens) / _SEQUENCE_TOKENS)
    length = math.ceil(len(tokens) / num)
    return [part for start in range(0, len(tokens), length) if len(part := tokens[start : start + length]) > 1]


def _reference_log_probs(path: str, sequences: list[list[int]]) -> "list[torch.Tensor]":
    """Return [L - 1] per sequence: transformers' own log-probs of its tokens but the first, float32
    logits, float64 sums."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    for name, module in model.named_modules():
        # transformers takes 1e-6 for these, trainer and servers take rms_norm_eps
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
    answers = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens])
            log_p = torch.log_softmax(model(ids).logits[0].double(), -1)
            answers.append(log_p[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return answers


def _compare_log_probs(
    job: ConversionRanks,
    model: "ModelParts",
    layout: "ParallelLayout",
    sequences: list[list[int]] | None,
    expected: "list[torch.Tensor] | None",
    tolerance: float,
) -> Comparison:
    """Compare the log-probs of the model with the expected ones, token by token.

    `sequences` and `expected` are given on the first process. The call is collective.
    """
    import torch
    import torch.distributed as dist

    payload: list = [sequences]
    dist.broadcast_object_list(payload, src=0)
    answers = log_probs(model, layout, payload[0])
    gathered: list = [None] * job.world_size
    dist.all_gather_object(gathered, answers)
    ours = next(part for part in gathered if part is not None)
    summary: list = [None]
    if job.is_main:
        assert expected is not None, "the first process has them"
        difference = torch.cat([(a.double() - b).abs() for a, b in zip(ours, expected, strict=True)])
        summary = [(difference.numel(), difference.max().item(), difference.mean().item())]
    dist.broadcast_object_list(summary, src=0)
    num, largest, mean = summary[0]
    return Comparison(
        "log-probs",
        f"{num} tokens at TP{layout.tp} PP{layout.pp}, beside transformers: largest difference {largest:.1e}, mean "
        f"{mean:.1e} (allowed: {tolerance:.1e})",
        largest <= tolerance,  # false for NaN
    )


def log_probs(model: "ModelParts", layout: "ParallelLayout", sequences: list[list[int]]) -> "list[torch.Tensor] | None":
    """Return [L - 1] per sequence, by Megatron: on the last stage's first tensor-parallel rank,
    none elsewhere. Collective."""
    import numpy as np

    from megatron_dapo.data.batching import TrainSample
    from megatron_dapo.data.packing import collate
    from megatron_dapo.training.schedule import Schedule

    batches = []
    for index, tokens in enumerate(sequences):
        mask = np.ones(len(tokens), dtype=np.float32)
        mask[-1] = 0
        row = np.array(tokens, dtype=np.int64)
        sample = TrainSample(index, str(index), row, mask, np.zeros_like(mask), 0.0, 0 * row)
        batches.append(collate([sample], pad_multiple=layout.sequence_multiple, packed=True))
    answers = Schedule(model, model.chunks, temperature=1.0).log_probs(batches)
    if answers is None or layout.tp_rank != 0:
        return None
    return [
        batch.by_sample(answer)[index][:-1].cpu()
        for index, (batch, answer) in enumerate(zip(batches, answers, strict=True))
    ]


def _round_trip(
    job: ConversionRanks,
    model: "ModelParts",
    layout: "ParallelLayout",
    folder: Path,
    spec: ModelSpec,
    source: "SafetensorsFolder",
) -> Comparison:
    """Write the checkpoint as Hugging Face files again, and compare them with those of the
    source."""
    import torch.distributed as dist

    from megatron_dapo.models.hf_io import export_hf

    dtype, beside = stored_dtype(folder), folder.resolve()  # visible to all nodes
    output = StagedFolder(beside.with_name(f"{beside.name}.round-trip"))

    def open_output() -> None:
        try:
            output.open()
        except UserError as error:
            raise UserError(f"--round-trip writes beside the checkpoint: {error}") from error

    try:
        job.on_main_rank(open_output)
        out = output.staging / HF
        export_hf(model, layout, folder / HF, out, plan=file_plan(folder, spec, dtype), dtype=dtype)
        payload: list = [_compare_files(out, source) if job.is_main else None]
        dist.broadcast_object_list(payload, src=0)
    finally:
        if job.is_main:
            output.discard()
    different, num = payload[0]
    if different:
        return Comparison("round trip", f"{len(different)} of {num} files differ: {', '.join(different[:3])}", False)
    return Comparison("round trip", f"{num} of {num} files equal to the byte", True)


def _compare_files(out: Path, source: "SafetensorsFolder") -> tuple[list[str], int]:
    """Return (names of the weight files that differ or are missing in one of them, number of files
    in both)."""
    names = sorted({file.name for folder in (out, source.path) for file in folder.glob("*.safetensors*")})
    different = [name for name in names if not _equal_files(out / name, source.path / name)]
    return different, len(names)


def _equal_files(a: Path, b: Path) -> bool:
    if not (a.is_file() and b.is_file() and a.stat().st_size == b.stat().st_size):
        return False
    with a.open("rb") as first, b.open("rb") as second:
        while piece := first.read(2**24):
            if piece != second.read(2**24):
                return False
    return True


if __name__ == "__main__":
    sys.exit(main())
