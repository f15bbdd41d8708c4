"""Converts a Hugging Face checkpoint to a Megatron checkpoint that any layout can load.

    python -m checkpoints_tools.hf_to_megatron --hf-model DIR --output DIR

Also under torchrun, srun or mpirun: then every process reads and writes only its part.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from checkpoints_tools.command_line import at_least
from checkpoints_tools.converted import (
    CONVERSION,
    FORMAT_VERSION,
    check_output,
    dtype_name,
    percentage,
    read_spec,
    source_dtype,
    torch_dtype,
)
from checkpoints_tools.job import ConversionRanks, run
from megatron_dapo.checkpointing.manifest import write_manifest
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.storage.model_folder import HF, MEGATRON
from megatron_dapo.storage.staged_folder import StagedFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0, or 2 for mistakes of the user and disks that fail; then there
    is no output."""
    arguments = parser().parse_args(argv)
    return run(lambda job: convert(job, arguments))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.hf_to_megatron",
        description="Convert a Hugging Face checkpoint (safetensors) to a Megatron checkpoint (torch_dist).",
        epilog="One process, or several of torchrun, srun or mpirun, each with only its part of the model.",
    )
    parser.add_argument("--hf-model", required=True, metavar="DIR", help="the Hugging Face checkpoint")
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="of the weights; auto: as they are (default)"
    )
    parser.add_argument("--tp", type=at_least(1), metavar="N", help="how the processes cut the model: tensor parallel")
    parser.add_argument("--pp", type=at_least(1), metavar="N", help="... pipeline parallel (default: all of them)")
    return parser


def convert(job: ConversionRanks, arguments: argparse.Namespace) -> None:
    """Convert. Collective; raises UserError on every process."""
    start = time.monotonic()
    from megatron_dapo.huggingface.model_tensors import hf_tensors
    from megatron_dapo.models.hf_io import check_hf_weights, exportable
    from megatron_dapo.models.safetensors_files import SafetensorsFolder

    def checked_source() -> tuple[ModelSpec, SafetensorsFolder]:
        spec = read_spec(arguments.hf_model, "--hf-model")
        folder = SafetensorsFolder(arguments.hf_model, "--hf-model")
        check_hf_weights(folder, spec)
        return spec, folder

    spec, folder = job.on_all_ranks(checked_source)
    names = hf_tensors(spec)
    dtype = torch_dtype(arguments.dtype) or job.on_all_ranks(lambda: source_dtype(folder, list(names)))
    job.on_main_rank(lambda: check_output(arguments.output, _num_bytes(spec, dtype)))
    output = StagedFolder(arguments.output)
    try:
        job.on_main_rank(output.open)
        _write_weights(job, arguments, spec, folder, dtype, output.staging)
        job.on_main_rank(lambda: _write_rest(folder, spec, dtype, output.staging))
        job.on_main_rank(output.publish)
    finally:
        if job.is_main:
            output.discard()
    if job.is_main:
        if left_out := set(folder.names) - exportable(spec):
            print_line(
                f"left out: {len(left_out)} tensors ({min(left_out)} ...), tables of rotary embeddings, implied by "
                "config.json, or layers of multi-token prediction, which are not trained"
            )
        print_line(f"{arguments.output}: written in {time.monotonic() - start:.1f} s")


def _num_bytes(spec: ModelSpec, dtype) -> int:
    from megatron_dapo.huggingface.model_tensors import hf_tensors
    from megatron_dapo.models.safetensors_files import TensorSpec
    from megatron_dapo.models.weight_map import stored_dtype

    return sum(TensorSpec(name, shape, stored_dtype(name, dtype)).num_bytes for name, shape in hf_tensors(spec).items())


def _write_weights(
    job: ConversionRanks, arguments: argparse.Namespace, spec: ModelSpec, folder, dtype, staging: Path
) -> None:
    from megatron_dapo.checkpointing.torch_dist.saving import save
    from megatron_dapo.models.build import build_model
    from megatron_dapo.models.hf_io import load_hf_weights

    megatron = MegatronConfig(dtype=dtype_name(dtype))
    with job.layout(spec, arguments.tp, arguments.pp) as layout:
        model = build_model(spec, layout, megatron, for_training=False)
        with percentage("reading") as done:
            job.on_all_ranks(lambda: load_hf_weights(model, folder, layout, done))
        if job.is_main:
            print("writing ...", file=sys.stderr, flush=True)
        job.on_all_ranks(lambda: save(staging / MEGATRON, model, layout).finish())


def _write_rest(folder, spec: ModelSpec, dtype, staging: Path) -> None:
    """Write all but the weights; the manifest last."""
    from megatron_dapo.models.file_plan import FilePlan
    from megatron_dapo.models.hf_io import copy_model_files, exportable

    (staging / HF).mkdir()
    copy_model_files(folder.path, staging / HF, dtype)
    record = {
        "format_version": FORMAT_VERSION,
        "source": str(folder.path.resolve()),
        "dtype": str(dtype).removeprefix("torch."),
        "plan": FilePlan.of(folder, exportable(spec)).to_dict(),
    }
    write_whole(staging / CONVERSION, json.dumps(record, indent=1) + "\n")
    write_manifest(staging, ["model"])


if __name__ == "__main__":
    sys.exit(main())
