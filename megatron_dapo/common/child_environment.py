"""What processes of ours find in their environment where the user's would not let them start, or work together."""

import getpass
import os
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megatron_dapo.common.errors import UserError

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
"""For their libraries the last two come before the first; OpenBLAS starts its threads when numpy is imported."""

COMMON = {"OMP_PROC_BIND": "false", "PYTHONUTF8": "1"}
"""Of every process. Threads bound to places (OMP_PLACES and GOMP_CPU_AFFINITY do it too): each process takes the first
core, and what it starts inherits that. Another encoding than UTF-8: torch and SGLang read their own files in the
locale's."""

# torch reads the first of them that is set
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Transformer Engine looks for a cuDNN in these folders, in this order, and then in the system
_CUDNN = ("CUDNN_HOME", "CUDNN_PATH")

# of what servers and kernels keep below ~
_CACHES = ("SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "TRITON_CACHE_DIR")
# a socket's path has at most 107 bytes; SGLang makes sockets in TMPDIR, named as tempfile does: /tmp01234567
_MAX_TMPDIR_BYTES = 107 - len("/tmp01234567")


def set_rank_defaults(environment: MutableMapping[str, str]) -> None:
    """Set what a rank of the trainer is better off with on a GPU, before it imports torch. What the user has set stays.

    One connection to the device: kernels start in the order in which they were asked for, so that Megatron's
    collectives begin before the products that are to hide them. Expandable segments: micro-batches differ in length,
    and an allocator of fixed blocks keeps some of every size. One process for torch.compile: it compiles two small
    kernels, for which each rank would start as many as the machine has cores, up to 32. The cuDNN that torch loads for
    Transformer Engine too, which would load the system's, another version, beside it.
    """
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if (home := _cudnn_of_packages()) and not any(name in environment for name in _CUDNN):
        environment[_CUDNN[0]] = str(home)


def _cudnn_of_packages() -> Path | None:
    """Return the folder of the cuDNN that torch finds among Python's packages, if there is one."""
    homes = (Path(folder, "nvidia", "cudnn") for folder in sys.path)
    return next((home for home in homes if any(home.glob("lib/libcudnn.so*"))), None)


def places_to_write(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add for a process that keeps caches below ~ and sockets in TMPDIR, where it could not: a
    container of a user without a home, a scratch folder with a long name. Raises UserError where there is no other
    place."""
    made = {}
    temporary = tempfile.gettempdir()
    if not has_room_for_sockets(temporary):
        made["TMPDIR"] = "/tmp"
    if not _can_make(Path(os.path.expanduser("~/.cache/sglang"))):
        caches = cache_folder({"TMPDIR": temporary})
        made |= {name: str(caches / name.lower()) for name in _CACHES if name not in environment}
    return made


def has_room_for_sockets(folder: str | Path) -> bool:
    """Return whether the path of a socket in this folder is short enough."""
    return len(os.fsencode(folder)) <= _MAX_TMPDIR_BYTES


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return a folder on this node's own disk, made where it is missing and kept for later jobs of the same user.

    It belongs to no one else, because programs run what lies in it. Raises UserError where there can be no such folder.
    """
    folder = Path(environment.get("TMPDIR") or "/tmp") / f"megatron_dapo-{_user()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}); set TMPDIR to another place.") from error
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UserError(f"{folder} is not a folder that only {_user()} can write; set TMPDIR to another place.")
    return folder


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as containers may be run with
        return str(os.getuid())


def _can_make(folder: Path) -> bool:
    """Return whether it is there, or can be, and be written. ~ stays where no home is known."""
    there = folder
    while not os.path.exists(there):
        there = there.parent
    return folder.is_absolute() and there.is_dir() and os.access(there, os.W_OK | os.X_OK)
