"""Packages that only training, serving and conversion need: the sentence for one that is missing."""

import importlib.util

from megatron_dapo.common.errors import UserError

_BY_PIP = "pip install '.[cpu]' in the repository, or '.[cuda]' for a machine with NVIDIA GPUs"
# not in the extra cpu
_BY_SETUP = "pip install '.[cuda]' in the repository for a machine with NVIDIA GPUs, or make setup for a CPU"
_HEAVY = {
    **dict.fromkeys(("einops", "math_verify", "megatron", "tensorboard", "torch", "transformers"), _BY_PIP),
    "sglang": _BY_SETUP,
    "triton": _BY_SETUP,
}


def absence(module: str | None) -> UserError | None:
    """Return the error of a module that is not found; None if it is of no heavy package, or the
    package is there."""
    package = (module or "").partition(".")[0]
    if package not in _HEAVY or _is_there(package):
        return None
    return UserError(
        f"The package {package}, which is needed here, is not installed; {_HEAVY[package]} (docs/install.md)."
    )


def _is_there(package: str) -> bool:
    """Return whether it can be imported. A folder of its name, such as megatron/ for converted models,
    is no package; Megatron-core lies in one."""
    spec = importlib.util.find_spec(package)
    return bool(spec and (spec.loader or importlib.util.find_spec(f"{package}.core")))


def require_package(name: str) -> None:
    """Raise UserError if a heavy package is missing; import nothing."""
    if error := absence(name):
        raise error
