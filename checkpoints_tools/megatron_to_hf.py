"""Converts a Megatron checkpoint, of training or of hf_to_megatron, to a Hugging Face checkpoint.

    python -m checkpoints_tools.megatron_to_hf --checkpoint DIR --output DIR

Also under torchrun, srun or mpirun: then every process holds only its part of the model.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_tools.command_line import at_least
from checkpoints_tools.converted import (
    DTYPE_CHOICES,
    card_of,
    check_output,
    dtype_name,
    open_checkpoint,
    percentage,
    read_conversion,
    read_spec,
    require_contents,
    stored_dtype,
    torch_dtype,
)
from checkpoints_tools.hub import open_repository, push
from checkpoints_tools.job import ConversionRanks, run
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import critic_spec
from megatron_dapo.storage.model_folder import CRITIC, HF, MEGATRON, ModelFolder

if TYPE_CHECKING:
    from megatron_dapo.models.file_plan import FilePlan

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0, or 2 for mistakes of the user and disks that fail; then there
    is no output."""
    arguments = parser().parse_args(argv)
    return run(lambda job: convert(job, arguments))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.megatron_to_hf",
        description="Convert a Megatron checkpoint, of any layout, to a Hugging Face checkpoint (safetensors).",
        epilog="One process, or several of torchrun, srun or mpirun, each with only its part of the model.",
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="of training (RUN/checkpoints/step_N) or of hf_to_megatron"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--dtype", choices=DTYPE_CHOICES, default="auto", help="of the weights; auto: as they are stored (default)"
    )
    parser.add_argument(
        "--max-file-size",
        type=_file_size,
        metavar="SIZE",
        help="e.g. 4GB; default: the files of the model that was converted, else about 4 GB",
    )
    parser.add_argument(
        "--critic",
        nargs="?",
        const="",
        metavar="DIR",
        help="convert the critic of a PPO run, to a token classifier of one label, for reward.model.path or "
        "critic.model.path; DIR: the run's critic.model.path, if it had one",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="then send the folder to this repository of the Hub, made private if there is none; the token is HF_TOKEN",
    )
    parser.add_argument("--tp", type=at_least(1), metavar="N", help="how the processes cut the model: tensor parallel")
    parser.add_argument("--pp", type=at_least(1), metavar="N", help="... pipeline parallel (default: all of them)")
    return parser


def _file_size(text: str) -> int:
    """Return the bytes of `500MB` or `4GB`. Raises ArgumentTypeError."""
    match = re.fullmatch(r"([1-9]\d*)\s*(KB|MB|GB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 4GB")
    return int(match[1]) * _UNITS[match[2]]


def convert(job: ConversionRanks, arguments: argparse.Namespace) -> None:
    """Convert. Collective; raises UserError on every process."""
    start = time.monotonic()
    from megatron_dapo.models.hf_io import export_hf

    is_critic = arguments.critic is not None

    def checked_source():
        folder = open_checkpoint(arguments.checkpoint)
        if not is_critic:
            return folder, MEGATRON, folder / HF, read_spec(folder / HF, "--checkpoint"), stored_dtype(folder)
        if not (folder / CRITIC).is_dir():
            raise UserError(
                f"--critic: `{folder}` has no {CRITIC} folder; give a checkpoint of algorithm.adv_estimator gae."
            )
        source = ModelFolder.of(arguments.critic).hf if arguments.critic else folder / HF
        return folder, CRITIC, source, read_spec(source, "--critic", critic_spec), stored_dtype(folder)

    folder, part, source, spec, stored = job.on_all_ranks(checked_source)
    dtype = torch_dtype(arguments.dtype) or stored
    plan = file_plan(None if is_critic else folder, spec, dtype, arguments.max_file_size)
    out, name = arguments.output, arguments.push_to_hub
    job.on_main_rank(lambda: check_output(out, plan.num_bytes))
    card = None if is_critic else job.on_main_rank(lambda: card_of(folder))
    repository = job.on_main_rank(lambda: open_repository(name)) if name else None
    require_contents(job, folder)
    with job.layout(spec, arguments.tp, arguments.pp) as layout:
        model = load_model(job, folder / part, spec, stored, layout)
        with percentage("writing") as done:
            export_hf(model, layout, source, out, plan=plan, dtype=dtype, replace=False, readme=card, progress=done)
    if job.is_main:
        print_line(f"{out}: written in {time.monotonic() - start:.1f} s")
    if name and (address := job.on_main_rank(lambda: push(repository or name, out))):
        print_line(f"{address}: sent")


def file_plan(folder: Path | None, spec: ModelSpec, dtype, max_file_size: int | None = None) -> "FilePlan":
    """Return the files of the converted model; standard ones for any other model, or with a
    size."""
    from megatron_dapo.models.file_plan import FilePlan

    conversion = read_conversion(folder) if folder is not None else None
    if max_file_size is not None:
        return FilePlan.standard(spec, dtype, max_file_size)
    return FilePlan.standard(spec, dtype) if conversion is None else FilePlan(**conversion["plan"])


def load_model(job: ConversionRanks, folder: Path, spec: ModelSpec, dtype, layout):
    """Load and return this process's part of a model, in the type `dtype`, from its folder in a
    checkpoint. The call is collective."""
    from megatron_dapo.checkpointing.torch_dist.loading import load
    from megatron_dapo.models.build import build_model

    if job.is_main:
        print("reading ...", file=sys.stderr, flush=True)
    model = build_model(spec, layout, MegatronConfig(dtype=dtype_name(dtype)), for_training=False)
    job.on_all_ranks(lambda: load(folder, model, layout))
    return model


if __name__ == "__main__":
    sys.exit(main())
