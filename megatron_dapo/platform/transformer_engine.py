"""Transformer Engine on this machine: does it import, and if not, why; is its cuDNN the one of
torch?"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineHere:
    """Versions and faults of Transformer Engine in this process; all None if it is not
    installed."""

    version: str | None = None
    """The package's version."""
    error: str | None = None
    """The error of its import."""
    cudnn: str | None = None
    """The version of the cuDNN that it calls."""
    torch_cudnn: str | None = None
    """The version of the cuDNN that torch calls."""
    cudnn_files: Sequence[str] = ()
    """The files of cuDNN in this process; more than one if there are two cuDNNs."""

    def __str__(self) -> str:
        if self.version is None:
            return "no Transformer Engine"
        if self.error is not None:
            return f"Transformer Engine {self.version}, which cannot be imported ({self.error})"
        return f"Transformer Engine {self.version} with cuDNN {self.cudnn}, torch with cuDNN {self.torch_cudnn}"

    def fault(self) -> str | None:
        """Return the fault on a node, with the cure; None: no fault, or not installed."""
        if self.error is not None:
            return f"has a {self}; install it again as docs/install.md says, or remove it."
        if self.cudnn == self.torch_cudnn and len(self.cudnn_files) < 2:
            return None
        return (
            f"has two cuDNNs in one process ({', '.join(self.cudnn_files)}): {self}; unset CUDNN_HOME and CUDNN_PATH, "
            "so that both take the one of the Python packages."
        )


def look() -> EngineHere:
    """Import Transformer Engine, as a rank will."""
    if importlib.util.find_spec("transformer_engine") is None:
        return EngineHere()
    version = _version()
    if error := import_error():
        return EngineHere(version, error)
    import torch
    from transformer_engine.pytorch.utils import get_cudnn_version

    number = torch.backends.cudnn.version() or 0
    of_torch = number // 10000, number // 100 % 100, number % 100
    of_its = get_cudnn_version()
    return EngineHere(version, None, _dotted(of_its), _dotted(of_torch), _loaded_files("libcudnn.so"))


def import_error() -> str | None:
    """Return why Transformer Engine cannot be imported, or None. Megatron-core drops the error of
    its own attempt."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "it is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # a missing library: OSError or ImportError; versions that differ: AssertionError
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _loaded_files(name: str) -> tuple[str, ...]:
    """Return the files loaded into this process with this beginning of their names."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return tuple(sorted(path for path in paths if Path(path).name.startswith(name)))


def _version() -> str:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:  # a folder in the way of the package
        return "without a version"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
