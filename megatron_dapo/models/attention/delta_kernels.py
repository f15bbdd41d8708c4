"""The kernels of gated delta nets on GPUs (flash-linear-attention), looked for before a run."""

import importlib

import torch

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.platform.device import is_gpu, model_dtype

HOPPER = 9  # major number of the compute capability
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))
"""Versions of Triton, from the first to before the last, with a wrong gradient on Hopper.

fla-core 0.6.0 refuses them in the backward pass (ops/common/chunk_o.py).
"""


def require_delta_kernels(spec: ModelSpec, megatron: MegatronConfig) -> None:
    """Raise UserError for a gated delta net on a GPU without kernels.

    In torch it keeps several numbers per token and pair of dimensions, and is slow. In float32
    there are no kernels at all.
    """
    if spec.delta_net is None or not is_gpu():
        return
    if model_dtype(megatron.dtype) == torch.float32:
        lack = f"{MEGATRON}.dtype is float32; set it to bfloat16."
    elif why := _import_error():
        lack = f"fla-core cannot be imported here ({why}); install requirements/cuda.txt."
    else:
        version = importlib.import_module("triton").__version__
        if not is_wrong_on(torch.cuda.get_device_capability(), version):
            return
        lack = f"their gradient is wrong on Hopper with Triton {version}; install requirements/cuda.txt."
    raise UserError(
        f"{spec.family} has gated delta nets, which need flash-linear-attention's kernels on GPUs, but {lack}"
    )


def is_wrong_on(capability: tuple[int, int], triton: str) -> bool:
    """Return whether the kernels' gradient is wrong on this GPU with this version of Triton."""
    numbers = tuple(int(part) for part in f"{triton.partition('+')[0]}.0".split(".")[:3] if part.isdigit())
    first, fixed = WRONG_ON_HOPPER
    return capability[0] == HOPPER and first <= numbers < fixed


def _import_error() -> str | None:
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
        importlib.import_module("fla.modules.causal_conv1d")
    except Exception as error:  # a kernel library may raise anything while it looks at the machine
        return str(error).partition("\n")[0] or type(error).__name__
    return None
