"""Environment variables of our processes, for settings of the user that would stop or slow them."""

import getpass
import os
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megatron_dapo.common.errors import UserError

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
"""The last two take precedence over the first; OpenBLAS starts its threads when numpy is
imported."""

COMMON = {"OMP_PROC_BIND": "false", "PYTHONUTF8": "1"}
"""For every process. With threads bound to cores (also by OMP_PLACES and GOMP_CPU_AFFINITY), each
process would take the first core, and its children inherit that. Without UTF-8, torch and SGLang
would read their own files in the locale's encoding."""

# torch reads the first one set
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Transformer Engine looks for a cuDNN in these folders, in this order, and then in the system
_CUDNN = ("CUDNN_HOME", "CUDNN_PATH")

# caches of servers and kernels below ~
_CACHES = ("SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "TRITON_CACHE_DIR")
# a socket's path has at most 107 bytes; SGLang makes sockets in TMPDIR, named as tempfile does:
# /tmp01234567
_MAX_TMPDIR_BYTES = 107 - len("/tmp01234567")


def set_rank_defaults(environment: MutableMapping[str, str], *, exports_memory: bool = False) -> None:
    """Set good defaults for a trainer rank on a GPU, before it imports torch. The user's own
    settings stay.

    - One connection to the device: kernels start in the order of their launch, so that Megatron's
      collectives begin before the products that hide them.
    - Expandable segments: micro-batches differ in length, and an allocator of fixed blocks keeps
      some of every size. Not for a rank that hands its memory to another process
      (exports_memory): such segments cannot be exported.
    - One process for torch.compile: it compiles two small kernels; by default each rank starts up
      to 32 workers.
    - The cuDNN of torch's package also for Transformer Engine, which would load the system's
      version beside it.
    """
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not (exports_memory or any(name in environment for name in _ALLOCATOR)):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if (home := _cudnn_of_packages()) and not any(name in environment for name in _CUDNN):
        environment[_CUDNN[0]] = str(home)


def _cudnn_of_packages() -> Path | None:
    """Return the folder of the cuDNN that torch finds among Python's packages, if there is one."""
    homes = (Path(folder, "nvidia", "cudnn") for folder in sys.path)
    return next((home for home in homes if any(home.glob("lib/libcudnn.so*"))), None)


def places_to_write(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process that cannot write its caches below ~ or its sockets in TMPDIR.

    Examples: a container's user without a home; a scratch folder with a long name.

    Raises:
        UserError: if no other folder is writable.
    """
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
    """Return a folder on this node's own disk, kept for later jobs of the same user.

    It must belong to that user, since programs run files in it.

    Raises:
        UserError: if no such folder can be made.
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
    """Return whether the folder is writable, or can be made. Without a known home, `~` stays
    unexpanded."""
    there = folder
    while not os.path.exists(there):
        there = there.parent
    return folder.is_absolute() and there.is_dir() and os.access(there, os.W_OK | os.X_OK)
